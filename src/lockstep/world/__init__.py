"""Determine rank and world size of this process, join the other ranks, choose device and threads."""

from lockstep.world.environments import detect
from lockstep.world.model import World

__all__ = ["World", "detect"]
