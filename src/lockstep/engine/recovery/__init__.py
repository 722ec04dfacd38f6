"""State of a run: points, snapshots, checkpoints, resume and preemption."""
