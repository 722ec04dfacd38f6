"""Waiting for keys of a store, interruptible and without torch's printed stacks.

A store's own `wait` keeps signals from being handled, and prints a stack where it gives up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

#: Called while something is waited for; raises when that has become pointless.
Check = Callable[[], None]

_PAUSES = (0.002, 0.05)


def go_on() -> None:
    """Continue waiting."""


def await_any(
    store: dist.Store, wanted: Sequence[Sequence[str]], seconds: float, check: Check = go_on
) -> int | None:
    """Wait until all keys of one of several groups exist; return its index, `None` after `seconds`.

    If several groups do, the first of them counts. `check` is called between two looks.

    Raises:
        RuntimeError: torch's own, if the store is gone.
    """
    deadline, pause = time.monotonic() + seconds, _PAUSES[0]
    while True:
        for number, keys in enumerate(wanted):
            if store.check(list(keys)):
                return number
        if time.monotonic() > deadline:
            return None
        check()
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
