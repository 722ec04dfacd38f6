"""Models whose layers lie on several ranks: partition, schedule, and messages between stages."""
