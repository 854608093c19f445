"""An engine's steps: what is sent to the daemon meanwhile, and whether their output may leave the engine."""
