"""Loaders: division of the global batches of a dataset into microbatches, and fetching of samples."""
