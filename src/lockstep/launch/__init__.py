"""The launcher: plan a launch, start its ranks, supervise them, report failures.

The package can be called: `lockstep.launch(main, n=2)` is `lockstep.launch.functions.launch`. The
name of the call and the name of the part of the house are the same word.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on several ranks: see `lockstep.launch.functions.launch`."""
        from lockstep.launch.functions import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
