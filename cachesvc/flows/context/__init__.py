"""Context of every flow: the core, the call, slices, counters."""
