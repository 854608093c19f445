"""Block keys, for daemon and client: 32 bytes, chained below a namespace.

Key of block i = BLAKE2b-256(parent key, tokens as little-endian u32, extra keys and the tokens that they cover), the
parent of block 0 being the namespace. So key i stands for the whole prefix, and equal keys in two namespaces cannot be.
BLAKE2b is RFC 7693. The client hashes them (``cachesvc_client.core.keys``); the daemon never sees a token, only keys
and their parents.
"""

from __future__ import annotations

import hashlib
import struct

KEY_BYTES = 32
MOST_KEYS = 65536
"""Keys of the longest prompt: a request carries no more."""


def namespace_of(model: str, layout_fingerprint: bytes, tenant_salt: bytes = b"", tenant: str = "") -> bytes:
    """32 bytes under which keys live: model, layout, salt and tenant. Nothing is ever shared across two of them.

    ``tenant`` is the name that the daemon itself knows the caller by: no salt leads into another tenant's namespaces.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kv-namespace")
    for part in (model.encode(), layout_fingerprint, tenant_salt, *((tenant.encode(),) if tenant else ())):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()
