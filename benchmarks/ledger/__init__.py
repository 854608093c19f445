"""The ledger and its policies."""
