"""Pipeline parallelism: partition of a model into stages, schedule, messages between stages."""
