"""SGLang on the daemon's pages beside SGLang alone and its HiCache, with real engines."""
