"""A parameter server: a process of the launch that is no rank, and never runs the user's script."""
