"""The storage engine ``mooncake``: objects in a Mooncake Store, memory that nodes share and lend to each other.

A master knows where objects are; servers (``mooncake_client``, or other daemons) hold them; the daemon is a client that
moves bytes between servers and its own host pages, with nothing in between. docs/storage-mooncake.md has what was tried
of it, and how it fails; the daemon trusts no answer of it.
"""
