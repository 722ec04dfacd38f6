"""`lockstep watch`: the progress of a run on a terminal, from its run directory."""
