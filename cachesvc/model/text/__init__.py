"""Text that people type: addresses, sizes, command lines."""
