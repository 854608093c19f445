"""Tests of tools, benchmarks and oracles."""
