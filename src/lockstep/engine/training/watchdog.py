"""Watchdog: while this rank waits, ranks that have ended or are stuck are named.

A rank that leaves a loop early, ends, or fails says so in the store, and so does one that waits for long.
A thread of every rank looks there while its own rank makes no progress. Only a thread can: the main one
waits inside a collective, where Python is not asked. Where ranks disagree the process ends, since nothing
else ends that wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.training.collective_check import WaitingRank, mismatch
from lockstep.engine.training.heartbeat import Heartbeat
from lockstep.engine.training.listeners import Listener
from lockstep.errors import EarlyExitError, LockstepError, PeerError
from lockstep.state.record import error_report, stacks
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous

_LOOK_SECONDS = 1.0
#: Seconds that the thread may take to end: one that asks a store whose host is gone does not.
_CLOSE_SECONDS = 2.0
#: Looks in which two ranks that wait have compared their calls.
_PATIENT_LOOKS = 3
#: Ranks that each rank compares itself with: the next ones. If any two differ, so do two in a row.
_COMPARED = 8
#: Seconds between two signs of life that a rank gives where no launcher of ours watches.
EVERY = 5.0
#: Seconds of silence after which a rank counts as lost. Code that keeps the interpreter's lock for long,
#: such as reading one huge file of JSON, is silent too.
SILENCE = 120.0
#: The longest time between two looks that counts: a rank that was stopped has heard nothing meanwhile.
_LONGEST_LOOK = 2 * EVERY


class Watchdog(Listener):
    """Publishes where this rank leaves loops and waits, and looks where the others do.

    Args:
        rendezvous: rendezvous of the ranks, with their store.
        heartbeat: where this rank stands.
        fail: told of the disagreement, and the line of the script, before the process ends; by default
            the launcher is.

    Attributes:
        also: what else its thread calls, twice as often as it looks.
    """

    def __init__(
        self,
        rendezvous: RankRendezvous,
        heartbeat: Heartbeat,
        fail: Callable[[LockstepError, stacks.Frame | None], None] | None = None,
    ) -> None:
        # A client of its own for the thread: the main thread's may be busy waiting.
        own: dist.Store = rendezvous.store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("watch", rendezvous.store)
        self._thread_store = dist.PrefixStore("watch", own)
        self._rendezvous = replace(rendezvous, store=own)
        self._heartbeat = heartbeat
        # A launcher that starts all ranks sees whether any of them moves.
        self._several = rendezvous.world.launch_file is None
        self._rank, size = rendezvous.world.rank, rendezvous.world.size
        self._others = _after(self._rank, range(size))
        # A launcher of ours looks itself for ranks that are gone.
        watched = rendezvous.world.environment == "lockstep"
        self._pulse = None if watched else Liveness(self._thread_store, self._rank, size)
        self._fail = fail or self._tell_launcher
        self.also: list[Callable[[], None]] = []
        self._loops = 0
        self._step = 0
        self._collectives = 0
        self._outer: list[tuple[str, int]] = []
        self._loop = ""
        self._in_backward = False
        self._row = range(0)
        self._looks = 0
        self._moves = 0
        self._seen: dict[int, WaitingRank] = {}
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-watch", daemon=True)
        self._thread.start()

    # --- the main thread -------------------------------------------------------------------------

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins."""
        self._outer.append((self._loop, self._collectives))
        self._loops += 1
        # Not by count: the main rank alone may loop over a loader for itself.
        self._loop = f"{loader}.{epoch}.{round_}"
        self._step = self._collectives = 0

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """The loop has come to another microbatch."""
        self._step = microbatch.step
        self._leave_backward()

    def backward_begins(self, microbatch: Microbatch, models: Sequence[int]) -> None:
        """A backward pass through `models` begins; on a rank's last microbatch it needs all ranks."""
        if microbatch.last:
            batch = (microbatch.loader, microbatch.epoch, microbatch.round, microbatch.step)
            self._heartbeat.enter("run.backward", (*batch, microbatch.turn, *models))
            self._in_backward = True

    def backward_ends(self) -> None:
        """The backward pass is over; on a rank's last microbatch all ranks have taken part in it."""
        if self._in_backward:
            self._collectives += 1
            self._leave_backward()

    def _leave_backward(self) -> None:
        """Say that this rank is in no backward pass; one that raised an exception is left, too."""
        if self._in_backward:
            self._heartbeat.leave()
            self._in_backward = False

    @contextlib.contextmanager
    def passing(self, row: range) -> Iterator[None]:
        """Go through a model of which each rank of `row` has a part, and wait for them."""
        before, self._row = self._row, row
        try:
            yield
        finally:
            self._row = before

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over."""
        self._leave_backward()
        self._store.set(f"{self._loop}/{self._rank}", f"{step} {self._collectives} {early:d}")
        self._loop, self._collectives = self._outer.pop()

    def run_ends(self) -> None:
        """This rank is about to end: it takes part in no further loop."""
        self._store.set(f"end/{self._rank}", f"{self._loops} 0 1")

    # --- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, wakes = -1, 0
        while not self._stop.wait(_LOOK_SECONDS / 2):
            wakes += 1
            # To agree on something takes two looks: a request to stop may leave few seconds.
            self._try(self.also)
            if wakes % 2:
                continue
            beat = self._heartbeat.beat
            self._looks = self._looks + 1 if beat == seen else 0
            seen = beat
            self._try([self._look])

    def _try(self, looks: Sequence[Callable[[], None]]) -> None:
        for look in looks:
            try:
                look()
            except dist.DistError as error:
                self._lose_store(error)
            except Exception as error:  # the thread also hears when to save and to stop
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Say once that a look has failed."""
        if not self._warned:
            self._warned = True
            told = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"lockstep: warning: the watchdog of rank {self._rank}: {told}\n")

    def _look(self) -> None:
        if self._pulse is not None:
            self._pulse.look()
        if not self._looks:
            if self._several:
                self._moves = self._thread_store.add("moves", 1)
            return
        self._hear_failure()
        if self._several:
            self._hear_moves()
        if self._pulse is not None and (error := self._pulse.lost()) is not None:
            self._end(error)
        row = self._row  # the main thread may continue
        if self._in_backward:
            self._compare_loops(self._others)
        elif row:
            self._compare_loops(_after(self._rank, row))
        if self._heartbeat.waits:
            self._compare_calls()

    def _hear_failure(self) -> None:
        """This rank stands still: has another one failed, which it may wait for in vain?"""
        store = self._rendezvous.store
        if store.check(["failed"]):
            self._end(PeerError(store.get("failed").decode()))

    def _hear_moves(self) -> None:
        """This rank stands still: tell its launcher, which sees its own ranks alone, if others move."""
        moves = self._thread_store.add("moves", 0)
        if moves != self._moves:
            self._heartbeat.others_move()
        self._moves = moves

    def _lose_store(self, error: dist.DistError) -> None:
        if self._looks and not self._stop.is_set():
            what = str(error).partition("\n")[0]
            self._end(PeerError(f"the store is gone, and with it the rank that hosts it: {what}"))

    def _compare_loops(self, others: Sequence[int]) -> None:
        """This rank waits in a pass through a model: does another one never come to it?"""
        for other in others:
            left = self._read(f"{self._loop}/{other}")
            ended = self._read(f"end/{other}")
            # A loop that another rank has been through may be one of its own, before another call: then
            # comparing calls tells more, and has been tried by now.
            counts = left is not None and (left[2] or self._looks > _PATIENT_LOOKS)
            if left is not None and counts and left[1] <= self._collectives:
                self._end_early(
                    f"rank {other} left this loop in batch {left[0]}, "
                    f"rank {self._rank} waits for it in batch {self._step}"
                )
            if ended is not None:
                self._end_early(
                    f"rank {other} ended after {ended[0]} loops over loaders, "
                    f"rank {self._rank} waits for it in loop {self._loops}"
                )

    def _compare_calls(self) -> None:
        """This rank waits: do other ranks that wait, and continue to wait, wait in another call?"""
        own = WaitingRank(
            rank=self._rank,
            looks=self._looks,
            place=str(stacks.users(stacks.of(_main_frame()))),
            recent=tuple(self._heartbeat.recent),
        )
        self._thread_store.set(f"at/{self._rank}", own.dump())
        for other in self._others:
            key = f"at/{other}"
            if not self._thread_store.check([key]):
                continue
            before, now = self._seen.get(other), WaitingRank.load(self._thread_store.get(key))
            self._seen[other] = now
            # It has been there since this rank's last look, and was there all the time.
            stays = before is not None and before.now == now.now and before.looks < now.looks
            if stays and (error := mismatch(own, now)) is not None and self._still_waits(own):
                self._end(error)

    def _still_waits(self, own: WaitingRank) -> bool:
        return self._heartbeat.waits and self._heartbeat.recent[-1] == own.now

    def _read(self, key: str) -> tuple[int, int, int] | None:
        if not self._thread_store.check([key]):
            return None
        first, second, third = map(int, self._thread_store.get(key).split())
        return first, second, third

    def _end_early(self, what: str) -> None:
        error = EarlyExitError(
            f"{what}; expected all ranks to run the same loops",
            hint="a `break` or `continue` must not depend on the rank or on one rank's values; "
            "reduce them first, for instance with run.mean",
        )
        self._end(error)

    def _end(self, error: LockstepError) -> None:
        if self._stop.is_set():
            return  # the main thread has gone on, and is closing the run
        # What Lockstep and torch do below the script's line is the same for all ranks that wait there.
        frames = [frame for frame in stacks.of(_main_frame()) if frame.is_users]
        text = "".join(f"  at {frame}\n" for frame in frames)
        print(f"lockstep: error: {error}\n{text}", end="", file=sys.stderr, flush=True)  # noqa: T201
        self._fail(error, frames[0] if frames else None)
        self._rendezvous.fail(error)
        os._exit(error.exit_code)

    def _tell_launcher(self, error: LockstepError, frame: stacks.Frame | None) -> None:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and self._pulse is None:
            told = error_report.describe(error, self._rank, home=None)
            if frame is not None:
                told = replace(told, file=frame.file, line=frame.line, function=frame.function)
            error_report.write(told, Path(path))

    def close(self) -> None:
        """Stop looking; a look that is under way has no effect any more."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)


class Liveness:
    """Signs of life between ranks that no launcher of ours watches.

    Each rank writes a number now and then, and looks at that of the next rank. A silent one is noticed by
    the one before it; what that one says ends all others, so that a look costs the same for any size.

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


def _after(rank: int, ranks: range) -> list[int]:
    """Return those of `ranks` that `rank`, one of them, compares itself with: the next ones, around."""
    place, size = ranks.index(rank), len(ranks)
    return [ranks[(place + ahead) % size] for ahead in range(1, min(size, _COMPARED + 1))]


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)
