"""`lockstep watch`: show the progress of a run on a terminal, read from its run directory."""
