"""Tests of ``cachesvc.flows.transfer``."""
