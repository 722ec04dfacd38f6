"""Who this process is, and where its peers are."""

from lockstep.world.detect import detect
from lockstep.world.model import World

__all__ = ["World", "detect"]
