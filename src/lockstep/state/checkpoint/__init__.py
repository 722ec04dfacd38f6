"""Save and restore the state of a run: snapshots in memory, and checkpoints on disk."""
