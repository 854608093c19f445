"""What the daemon says of itself: events with constant names."""
