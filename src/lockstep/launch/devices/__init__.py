"""CPU cores and GPUs of this machine, and their assignment to ranks."""
