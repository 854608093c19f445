"""What the daemon does: one use case a file. Plain functions over a Core; they never await, copy or log."""
