"""Ranks that train by themselves between averages of their parameters (local SGD, DiLoCo)."""
