"""The saved state of a run: checkpoints and snapshots, records, and the files of its directory."""
