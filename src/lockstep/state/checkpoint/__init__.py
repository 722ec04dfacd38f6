"""Snapshots in host memory, checkpoints on disk, and restoring a run from them."""
