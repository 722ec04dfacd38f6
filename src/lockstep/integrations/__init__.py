"""Adapters of other frameworks' trainers: each translates their words into those of a `lockstep.Run`."""
