"""Rank and world of this process: detection, rendezvous, process group, devices."""

from lockstep.world.detect import detect
from lockstep.world.model import World

__all__ = ["World", "detect"]
