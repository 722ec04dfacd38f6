"""Strategy `fsdp`: models that FSDP2 shards in units.

A unit is a submodule whose parameters are gathered together.
"""
