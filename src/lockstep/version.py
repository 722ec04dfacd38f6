"""Version of Lockstep."""

__version__ = "0.1.0"
