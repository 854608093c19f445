"""Tests of ``cachesvc.flows.models.registration``."""
