"""Watchdog: names ranks that have ended or are stuck while this rank waits for them.

A rank that leaves a loop early, ends, fails or waits for long writes that to the store. A thread of every
rank reads it while its own rank makes no progress: the main thread waits inside a collective, where no
Python runs. Where ranks disagree the process ends, since nothing else ends that wait.
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
#: Each rank compares its calls with those of so many ranks after it: where calls differ anywhere, they
#: differ between neighbours.
_COMPARED = 8
#: Seconds between two signs of life that a rank gives where no launcher of ours watches.
EVERY = 5.0
#: Seconds of silence after which a rank counts as lost. Code that keeps the interpreter's lock for long,
#: such as reading one huge file of JSON, is silent too.
SILENCE = 120.0
#: The longest time between two looks that counts: a rank that was stopped has read nothing meanwhile.
_LONGEST_LOOK = 2 * EVERY


class Watchdog(Listener):
    """Writes to the store where this rank leaves loops and waits, and reads what other ranks write.

    Args:
        rendezvous: rendezvous of the ranks, with their store.
        heartbeat: this rank's latest calls.
        fail: called with the error, and the line of the script, before the process ends; by default it
            reports them to the launcher.

    Attributes:
        also: further functions that the thread calls, twice as often as it looks.
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
        self._fail = fail or self._report
        self.also: list[Callable[[], None]] = []
        self._loops = self._step = self._collectives = 0
        self._outer: list[tuple[str, int]] = []
        self._loop = ""
        self._in_backward = False
        self._row = range(0)
        self._looks = self._moves = 0
        self._seen: dict[int, WaitingRank] = {}
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-watch", daemon=True)
        self._thread.start()

    # --- the main thread -------------------------------------------------------------------------

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """Begin a loop over a loader."""
        self._outer.append((self._loop, self._collectives))
        self._loops += 1
        # Not by count: the main rank alone may loop over a loader for itself.
        self._loop = f"{loader}.{epoch}.{round_}"
        self._step = self._collectives = 0

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Begin a microbatch."""
        self._step = microbatch.step
        self._leave_backward()

    def backward_begins(self, microbatch: Microbatch, models: Sequence[int]) -> None:
        """Begin a backward pass through `models`; on a rank's last microbatch it needs all ranks."""
        if microbatch.last:
            batch = (microbatch.loader, microbatch.epoch, microbatch.round, microbatch.step)
            self._heartbeat.enter("run.backward", (*batch, microbatch.turn, *models))
            self._in_backward = True

    def backward_ends(self) -> None:
        """End the backward pass; on a rank's last microbatch all ranks have taken part in it."""
        if self._in_backward:
            self._collectives += 1
            self._leave_backward()

    def _leave_backward(self) -> None:
        """Note that this rank is in no backward pass, also after one that raised an exception."""
        if self._in_backward:
            self._heartbeat.leave()
            self._in_backward = False

    @contextlib.contextmanager
    def passing(self, row: range) -> Iterator[None]:
        """Run the body, a pass through a model of which each rank of `row` has a part."""
        before, self._row = self._row, row
        try:
            yield
        finally:
            self._row = before

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """End a loop over a loader."""
        self._leave_backward()
        self._store.set(f"{self._loop}/{self._rank}", f"{step} {self._collectives} {early:d}")
        self._loop, self._collectives = self._outer.pop()

    def run_ends(self) -> None:
        """Note that this rank takes part in no further loop."""
        self._store.set(f"end/{self._rank}", f"{self._loops} 0 1")

    # --- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, wakes = -1, 0
        while not self._stop.wait(_LOOK_SECONDS / 2):
            wakes += 1
            # To agree on something takes two looks: a request to stop may leave few seconds.
            for function in self.also:
                self._try(function)
            if wakes % 2:
                continue
            beat = self._heartbeat.beat
            self._looks = self._looks + 1 if beat == seen else 0
            seen = beat
            self._try(self._look)

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except dist.DistError as error:
            if self._looks and not self._stop.is_set():
                what = str(error).partition("\n")[0]
                self._end(
                    PeerError(f"the store is gone, and with it the rank that hosts it: {what}")
                )
        except Exception as error:  # the thread also reads when to save and to stop
            if not self._warned:
                self._warned = True
                what = f"{type(error).__name__}: {error}"
                sys.stderr.write(f"lockstep: warning: the watchdog of rank {self._rank}: {what}\n")

    def _look(self) -> None:
        if self._pulse is not None:
            self._pulse.look()
        if self._several:  # the launcher sees only its own ranks stand still
            moves = self._thread_store.add("moves", int(not self._looks))
            if self._looks and moves != self._moves:
                self._heartbeat.others_move()
            self._moves = moves
        if not self._looks:
            return
        store = self._rendezvous.store
        if store.check(["failed"]):
            self._end(PeerError(store.get("failed").decode()))
        if self._pulse is not None and (error := self._pulse.lost()) is not None:
            self._end(error)
        row = self._row  # the main thread may continue
        if self._in_backward:
            self._compare_loops(self._others)
        elif row:
            self._compare_loops(_after(self._rank, row))
        if self._heartbeat.waits:
            self._compare_calls()

    def _compare_loops(self, others: Sequence[int]) -> None:
        """End this rank, which waits in a pass through a model, if another rank never comes to it."""
        for other in others:
            left = self._read(f"{self._loop}/{other}")
            ended = self._read(f"end/{other}")
            # A loop that another rank has been through may be its own, before another call: comparing
            # calls says more then, and comes first.
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
        """End this rank, which waits in a call, if another rank waits in a different call."""
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
            # The other rank has been there since this rank's last look.
            stays = before is not None and before.now == now.now and before.looks < now.looks
            error = mismatch(own, now) if stays else None
            still_waits = self._heartbeat.waits and self._heartbeat.recent[-1] == own.now
            if error is not None and still_waits:
                self._end(error)

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
        # Frames of Lockstep and torch are the same for all ranks that wait in a line of the script.
        frames = [frame for frame in stacks.of(_main_frame()) if frame.is_users]
        text = "".join(f"  at {frame}\n" for frame in frames)
        print(f"lockstep: error: {error}\n{text}", end="", file=sys.stderr, flush=True)  # noqa: T201
        self._fail(error, frames[0] if frames else None)
        self._rendezvous.fail(error)
        os._exit(error.exit_code)

    def _report(self, error: LockstepError, frame: stacks.Frame | None) -> None:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and self._pulse is None:
            report = error_report.describe(error, self._rank, home=None)
            if frame is not None:
                report = replace(report, file=frame.file, line=frame.line, function=frame.function)
            error_report.write(report, Path(path))

    def close(self) -> None:
        """Stop the thread; a look that is under way has no further effect."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)


class Liveness:
    """Heartbeats between ranks that no launcher of ours watches.

    Each rank writes a number now and then, and reads that of the next rank. So a look costs the same for
    any number of ranks; the rank that finds a silent one ends all others by its error.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank = store, (rank + 1) % size
        self._own, self._next = f"alive/{rank}", f"alive/{self._rank}"
        self._beats, self._latest, self._silent = 0, b"", 0.0
        self._looked = time.monotonic()

    def look(self) -> None:
        """Write this rank's number and read the next rank's, if `EVERY` seconds have passed."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < EVERY:
            return
        self._looked = now
        self._beats += 1
        self._store.set(self._own, str(self._beats))
        latest = self._store.get(self._next) if self._store.check([self._next]) else b""
        self._silent = self._silent + min(passed, _LONGEST_LOOK) if latest == self._latest else 0.0
        self._latest = latest

    def lost(self) -> PeerError | None:
        """Return the error of the next rank, if it is lost."""
        if self._silent < SILENCE:
            return None
        return PeerError(
            f"rank {self._rank} gives no sign of life for {self._silent:.0f} s; "
            f"expected one every {EVERY:.0f} s",
            hint="it was killed or stopped, or its machine is lost: look there, and at its log",
        )


def _after(rank: int, ranks: range) -> list[int]:
    """Return the ranks that `rank` compares itself with: the next ones in `ranks`, cyclically."""
    index, size = ranks.index(rank), len(ranks)
    return [ranks[(index + ahead) % size] for ahead in range(1, min(size, _COMPARED + 1))]


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)
