"""`await_any`: wait for keys of a store by polling, so that signals are handled during the wait.

A store's own `wait` blocks signal handlers, and prints a C++ stack at its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

#: Function that is called repeatedly during a wait, and may raise to end the wait.
Check = Callable[[], None]

_PAUSES = (0.002, 0.05)


def go_on() -> None:
    """Do nothing; used as the `check` argument of `await_any`, it never ends a wait."""


def await_any(
    store: dist.Store, wanted: Sequence[Sequence[str]], seconds: float, check: Check = go_on
) -> int | None:
    """Wait until all keys of at least one group exist; return the index of the first such group.

    `wanted` are the groups of keys. Returns `None` after `seconds`. `check` is called between two polls of
    the store, and may raise to end the wait.

    Raises:
        RuntimeError: if the connection to the store is lost.
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
