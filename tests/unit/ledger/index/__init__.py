"""Tests of ``cachesvc.ledger.index.block_index``."""
