"""Compute steps of a recorded run again, or branch a new run from it: `lockstep replay` and others."""
