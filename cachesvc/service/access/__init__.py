"""Access: callers and their rights, by tokens, tenants, quotas and ownership."""
