"""Computation with integers only: shares of replicas and samples, random keys, the reduction tree."""
