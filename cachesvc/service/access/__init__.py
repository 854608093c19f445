"""Who may call, and how much: tokens, tenants, quotas, ownership."""
