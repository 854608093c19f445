"""A process's connection to its daemon: its lease, its slab, and how it comes back after a loss."""
