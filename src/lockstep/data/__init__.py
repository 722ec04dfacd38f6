"""From a dataset to this rank's microbatches."""
