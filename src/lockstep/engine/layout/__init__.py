"""Functions on numbers only: replicas of each rank, order of samples, seeds, order of additions."""
