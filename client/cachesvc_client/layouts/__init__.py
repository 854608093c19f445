"""Layouts of attention families, and of models by their configuration."""
