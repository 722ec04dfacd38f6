"""Watching a run from outside: what its run directory says now, on a terminal."""
