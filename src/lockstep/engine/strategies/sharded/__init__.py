"""Strategy `fsdp`: models sharded by FSDP2 in units, submodules whose parameters are gathered together."""
