"""Tests of ``cachesvc_ctl``."""
