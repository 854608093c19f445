"""What is true: who holds which page, block, sequence and lease. Synchronous; touches no clock, socket or thread."""
