"""Loaders: they split the global batches of a dataset into this rank's microbatches."""
