"""Tests of ``cachesvc.ledger.pages.page_pool``."""
