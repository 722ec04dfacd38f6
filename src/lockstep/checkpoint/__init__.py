"""State that is never lost: snapshots in host memory, checkpoints on disk, and the way back."""
