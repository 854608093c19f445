"""Stub: SGLang imports what shows progress in notebooks."""
