"""What is cached outlives the daemon: host pages to a storage engine and back, believed only once they are verified."""
