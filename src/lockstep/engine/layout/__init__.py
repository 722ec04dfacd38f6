"""Functions without tensors: replicas of each rank, order of samples, random seeds, order of additions."""
