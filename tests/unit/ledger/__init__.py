"""Tests of ``cachesvc.ledger``."""
