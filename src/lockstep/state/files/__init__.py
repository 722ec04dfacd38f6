"""Files of a run directory: atomic writes, the lock, the run file."""
