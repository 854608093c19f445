"""Storage tier, which outlives the daemon: host pages to a storage engine and back, used only once they are
verified."""
