"""Strategy `fsdp`: models sharded by FSDP2, their units (submodules gathered together), wrap policy."""
