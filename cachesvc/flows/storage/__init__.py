"""Storage, and pages lent to other nodes."""
