"""Strategies (`ddp`, `fsdp`, …): distribution of a model, its gradients and buffers over the ranks."""
