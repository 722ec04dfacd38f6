"""Records of a run: events, the trace of every step, logged values, progress, error reports."""
