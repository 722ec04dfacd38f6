"""Start, watch, restart and end the worker processes of one launcher."""
