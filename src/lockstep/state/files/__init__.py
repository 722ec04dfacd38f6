"""Files of a run directory: atomic writes, the lock, and `run.json`."""
