"""Tests of ``cachesvc.flows``."""
