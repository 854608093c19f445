"""The node cache daemon: one process that owns the KV cache of every engine on a GPU node."""

__version__ = "0.1.0"
