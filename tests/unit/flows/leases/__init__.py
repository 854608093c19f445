"""Tests of ``cachesvc.flows.leases.leases``."""
