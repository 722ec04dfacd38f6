"""Adapters for trainers of other frameworks: they train through a `lockstep.Run`."""
