"""SGLang's KV cache in place on the daemon's pages: a plugin of SGLang, chosen by ``--radix-cache-backend cachesvc``.

SGLang loads it by its entry point ``sglang.srt.plugins`` (``plugin.activate``). Only a use of it needs SGLang;
importing this package does not.
"""
