"""Cores and GPUs of this machine, and which of them each rank gets."""
