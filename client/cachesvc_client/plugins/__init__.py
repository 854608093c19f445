"""Parts that plugins of engines share, whose KV memory is the daemon's slab: they know no engine, and nothing else of
the client needs them."""
