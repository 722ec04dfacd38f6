"""A user's mistake, told in one message."""

from __future__ import annotations

import sys
from typing import Any


def show_plainly() -> None:
    """Let an error of the user's be one message instead of a traceback, under plain `python` too."""
    if sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        from lockstep.errors import LockstepError

        if isinstance(error, LockstepError):
            sys.stderr.write(f"lockstep: error: {error}\n")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
