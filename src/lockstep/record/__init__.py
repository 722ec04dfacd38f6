"""What stays of a run: its directory, its record, its events, its trace."""
