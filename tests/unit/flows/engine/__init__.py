"""Tests of ``cachesvc.flows.engine``."""
