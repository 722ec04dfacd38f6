"""The watch over other ranks: a rank that left a loop is named instead of waited for.

A rank that leaves a loop early, ends, or fails says so in the store. A thread of every other rank looks
there while its own rank makes no progress. Only a thread can: the main one waits inside a collective,
where Python is not asked. Where ranks disagree the process ends, since nothing else ends that wait.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lockstep.data.microbatch import Microbatch
from lockstep.errors import EarlyExitError, PeerError

_LOOK_SECONDS = 1.0


class Watch:
    """Publishes where this rank leaves loops, and looks where the others did.

    Args:
        store: a store that all ranks reach.
        rank: this rank.
        size: number of ranks.
        fail: told of the disagreement before the process ends.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, fail: Callable[[PeerError], None]
    ) -> None:
        self._store = dist.PrefixStore("watch", store)
        # A client of its own: the main thread's may be busy waiting.
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._thread_store = dist.PrefixStore("watch", own)
        self._failures = own
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._fail = fail
        self._loops = 0
        self._step = 0
        self._meetings = 0
        self._outer: list[tuple[str, int]] = []
        self._loop = ""
        self._place = ""
        self._meeting = False
        self._beat = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lockstep-watch", daemon=True)
        self._thread.start()

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins."""
        self._outer.append((self._loop, self._meetings))
        self._loops += 1
        # Not by count: the main rank alone may loop over a loader for itself.
        self._loop = f"{loader}.{epoch}.{round_}"
        self._step = self._meetings = 0
        self._beat += 1

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """The loop has come to another microbatch."""
        self._step = microbatch.step
        self._meeting = False
        self._beat += 1

    def backward_begins(self, microbatch: Microbatch, models: Sequence[int]) -> None:
        """A backward pass through `models` begins; on a rank's last microbatch it needs all ranks."""
        self._place = f"{microbatch.place} {' '.join(map(str, models))}"
        self._meeting = microbatch.last
        self._beat += 1

    def backward_ends(self) -> None:
        """The backward pass is over; on a rank's last microbatch all ranks have met in it."""
        self._meetings += self._meeting
        self._meeting = False
        self._beat += 1

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """The parameters have been updated."""
        self._beat += 1

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over."""
        self._meeting = False
        self._beat += 1
        self._store.set(f"{self._loop}/{self._rank}", f"{step} {self._meetings}")
        self._loop, self._meetings = self._outer.pop()

    def run_ends(self) -> None:
        """This rank is about to end: it takes part in no further loop."""
        self._store.set(f"end/{self._rank}", f"{self._loops} 0")

    def _look(self) -> None:
        seen = -1
        while not self._stop.wait(_LOOK_SECONDS):
            if seen == self._beat:
                self._hear_failure()
                if self._meeting:
                    self._compare()
            seen = self._beat

    def _hear_failure(self) -> None:
        """This rank stands still: has another one failed, which it may wait for in vain?"""
        if self._failures.check(["failed"]):
            self._end(PeerError(self._failures.get("failed").decode()))

    def _compare(self) -> None:
        """This rank waits in a backward pass: does another one never come to it?"""
        self._thread_store.set(f"at/{self._rank}", self._place)
        for other in self._others:
            left = self._read(f"{self._loop}/{other}")
            ended = self._read(f"end/{other}")
            if left is not None and left[1] <= self._meetings:
                self._end_early(
                    f"rank {other} left this loop in batch {left[0]}, "
                    f"rank {self._rank} waits for it in batch {self._step}"
                )
            if ended is not None:
                self._end_early(
                    f"rank {other} ended after {ended[0]} loops over loaders, "
                    f"rank {self._rank} waits for it in loop {self._loops}"
                )
            self._compare_models(other)

    def _compare_models(self, other: int) -> None:
        """Two ranks wait for each other in one place: do they wait for the same gradients?"""
        if not self._thread_store.check([f"at/{other}"]):
            return
        place, _, models = self._thread_store.get(f"at/{other}").decode().partition(" ")
        own_place, _, own_models = self._place.partition(" ")
        if place == own_place and models != own_models:
            self._end_early(
                f"rank {self._rank} computes gradients of the run's models {own_models or 'none'}, "
                f"rank {other} of {models or 'none'} in the same batch (counted from 0)"
            )

    def _read(self, key: str) -> tuple[int, int] | None:
        if not self._thread_store.check([key]):
            return None
        first, second = self._thread_store.get(key).split()
        return int(first), int(second)

    def _end_early(self, what: str) -> None:
        error = EarlyExitError(
            f"{what}; expected all ranks to run the same loops",
            hint="a `break` or `continue` must not depend on the rank or on one rank's values; "
            "reduce them first, for instance with run.mean",
        )
        self._end(error)

    def _end(self, error: PeerError) -> None:
        print(f"lockstep: error: {error}\n{_main_stack()}", file=sys.stderr, flush=True)  # noqa: T201
        self._fail(error)
        os._exit(error.exit_code)

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()


def _main_stack() -> str:
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""
