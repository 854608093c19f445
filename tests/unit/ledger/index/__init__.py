"""Tests of ``cachesvc.ledger.block_index``."""
