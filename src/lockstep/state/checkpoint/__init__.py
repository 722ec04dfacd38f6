"""The state of a run: snapshots in host memory, checkpoints on disk, and how to restore a run from one."""
