"""Tests of ``cachesvc.ledger.order``."""
