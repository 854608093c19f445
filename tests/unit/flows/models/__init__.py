"""Tests of ``cachesvc.flows.registration``."""
