"""Tests on a real GPU: bytes, order, sharing, and engines and daemons that die."""
