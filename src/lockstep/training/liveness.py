"""Signs of life between ranks that no launcher of ours watches.

Each rank writes a number now and then, and looks at that of the next rank. Who is silent is noticed by
the one before it; what that one says ends all others, so that a look costs the same for any size.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from lockstep.errors import PeerError

#: Seconds between two signs.
EVERY = 5.0
#: Seconds of silence after which a rank counts as lost. Code that keeps the interpreter's lock for long,
#: such as reading one huge file of JSON, is silent too.
SILENCE = 120.0
#: The longest time between two looks that counts: a rank that was stopped has heard nothing meanwhile.
_LONGEST_LOOK = 2 * EVERY


class Liveness:
    """The signs of this rank and of the next one.

    Args:
        store: where ranks write them.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._own = f"alive/{rank}"
        self._rank = (rank + 1) % size
        self._next = f"alive/{self._rank}"
        self._beats = 0
        self._heard = b""
        self._silent = 0.0
        self._looked = time.monotonic()

    def look(self) -> None:
        """Give a sign, and look for the next rank's; often called, and seldom does either."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < EVERY:
            return
        self._looked = now
        self._beats += 1
        self._store.set(self._own, str(self._beats))
        heard = self._store.get(self._next) if self._store.check([self._next]) else b""
        self._silent = self._silent + min(passed, _LONGEST_LOOK) if heard == self._heard else 0.0
        self._heard = heard

    def lost(self) -> PeerError | None:
        """Return that the next rank is lost, if it is."""
        if self._silent < SILENCE:
            return None
        return PeerError(
            f"rank {self._rank} gives no sign of life for {self._silent:.0f} s; "
            f"expected one every {EVERY:.0f} s",
            hint="it was killed or stopped, or its machine is lost: look there, and at its log",
        )
