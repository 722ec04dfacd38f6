"""Clocks of the nodes: none decides anything, but records and verdicts order events by them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.world.waiting import Check, await_any, go_on

if TYPE_CHECKING:
    import torch.distributed as dist

#: A difference that makes the order of events in records misleading, in seconds.
_TOLERANCE = 2.0
_SECONDS = 5.0


def compare(store: dist.Store, index: int, labels: Sequence[str], check: Check = go_on) -> None:
    """Warn on node 0 where another node's clock differs; every node takes part.

    All read their clocks when node 0 gives the sign, so that the time of a message is all that the
    comparison misses.

    Args:
        store: a store that all nodes reach, used for this alone.
        index: number of this node.
        labels: what to call the nodes.
        check: called again and again meanwhile; may raise to end it.
    """
    store.set(f"ready/{index}", "1")
    everybody = range(len(labels))

    def have_come(what: str) -> bool:
        keys = [f"{what}/{other}" for other in everybody]
        return await_any(store, [keys], _SECONDS, check) is not None

    if index == 0 and have_come("ready"):
        store.set("go", "1")
    # Not worth a launch: whoever is gone by now is missed where it matters.
    if await_any(store, [["go"]], 2 * _SECONDS, check) is None:
        return
    store.set(f"clock/{index}", repr(time.time()))
    if index == 0 and have_come("clock"):
        here, *others = (float(store.get(f"clock/{other}")) for other in everybody)
        for label, there in zip(labels[1:], others, strict=True):
            _warn(label, there - here)


def _warn(label: str, ahead: float) -> None:
    if abs(ahead) > _TOLERANCE:
        print(  # noqa: T201 - a warning for whoever reads the records
            f"lockstep: warning: the clock of {label} is {abs(ahead):.0f} s "
            f"{'ahead of' if ahead > 0 else 'behind'} that of node 0: times in records don't compare",
            file=sys.stderr,
            flush=True,
        )
