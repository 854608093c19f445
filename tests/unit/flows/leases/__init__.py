"""Tests of ``cachesvc.flows.leases``."""
