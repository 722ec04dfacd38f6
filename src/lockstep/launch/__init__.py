"""The launcher: plan a launch, start its ranks, monitor and restart them, report failures.

The package is callable: `lockstep.launch(main, n=2)` calls `lockstep.launch.functions.launch`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `lockstep.launch.functions.launch`, which runs a function on several ranks."""
        from lockstep.launch.functions import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
