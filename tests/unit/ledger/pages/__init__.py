"""Tests of ``cachesvc.ledger.page_pool``."""
