"""Tests of ``cachesvc.ledger.eviction``."""
