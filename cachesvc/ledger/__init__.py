"""The daemon's state: holders of each page, block, sequence and lease. Synchronous; touches no clock, socket or
thread."""
