"""Parameter servers: processes that sum gradients or update parameters, and the strategy `ps`."""
