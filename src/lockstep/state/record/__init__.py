"""Records of a run: its directory, `run.json`, events, trace."""
