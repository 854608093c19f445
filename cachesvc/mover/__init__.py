"""Movers in processes of their own: one a device, which owns its memory, its link and its timeline words.

The daemon's side is ``processes.py`` over ``life.py``, the mover's ``server.py``; between them lie two rings of records
in shared memory and a connection for what is rare. ARCHITECTURE.md has the whole.
"""
