"""Use cases of the daemon, one a file. Plain functions over a Core; they never await, copy or log."""
