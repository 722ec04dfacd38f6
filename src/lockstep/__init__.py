"""Lockstep: the same PyTorch script gives the same weights, bit for bit, on any layout.

Importing this package does not import torch; a public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.errors import LockstepError
    from lockstep.launch.api import launch
    from lockstep.run import Run
    from lockstep.world import World, detect

__all__ = ["LockstepError", "Run", "World", "__version__", "detect", "launch"]

_PLACES = {
    "LockstepError": "lockstep.errors",
    "Run": "lockstep.run",
    "World": "lockstep.world",
    "detect": "lockstep.world",
    "launch": "lockstep.launch.api",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
