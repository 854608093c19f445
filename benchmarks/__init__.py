"""Benchmarks that measure the budgets."""
