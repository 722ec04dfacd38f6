"""Start, watch, restart and end the processes of one launcher."""
