"""Steps sent ahead from vLLM's scheduler thread, and what they keep at hand for it."""
