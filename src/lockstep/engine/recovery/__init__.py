"""Saving and restoring the state of a run: snapshots, checkpoints, resume and preemption."""
