"""Sharded models (FSDP2): units, wrap policy, and the strategy `fsdp`."""
