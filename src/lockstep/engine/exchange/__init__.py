"""Exchanges: implementations of the sum of gradients over all ranks."""
