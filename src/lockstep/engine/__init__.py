"""Training: the loop, strategies, exchanges, parameter servers, data, layout and recovery."""
