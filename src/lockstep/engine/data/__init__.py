"""Datasets, orders of epochs, and loaders of this rank's microbatches."""
