"""Strategies: how a model, its gradients and its buffers are distributed over the ranks."""
