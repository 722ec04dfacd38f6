"""Pipeline parallelism: partition into stages, schedule, messages between stages."""
