"""Saved data of a run: checkpoints, snapshots, logs and traces, and the files of the run directory."""
