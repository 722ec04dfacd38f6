"""How a model is held: what happens to its gradients and buffers in every microbatch."""
