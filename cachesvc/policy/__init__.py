"""Choices: eviction order and write-back rules. Pure; facts come in as arguments."""
