"""Exchanges: sums of gradients over all ranks."""
