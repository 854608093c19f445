"""Identity of engines that share: facts, and digests of checkpoints."""
