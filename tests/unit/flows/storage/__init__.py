"""Tests of ``cachesvc.flows.storage``."""
