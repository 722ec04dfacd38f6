"""What a run keeps: checkpoints and snapshots, records, and the files of its directory."""
