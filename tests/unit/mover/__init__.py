"""Tests of ``cachesvc.mover``."""
