"""`Watchdog`: ends a rank that waits in a collective call which another rank will never make.

A rank that leaves a loop early, ends, fails or waits for long writes this to the key-value store. A thread
of every rank reads the store while the main thread makes no progress, since inside of a collective call the
main thread runs no Python. If ranks are in different calls the thread ends the process with an error.
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

from lockstep.engine.data.microbatch import LoopKey, Microbatch
from lockstep.engine.training.collective_check import WaitingRank, mismatch
from lockstep.engine.training.heartbeat import Heartbeat
from lockstep.engine.training.listeners import Listener
from lockstep.errors import EarlyExitError, LockstepError, PeerError
from lockstep.state.record import error_report, stacks
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous

_LOOK_SECONDS = 1.0
#: Seconds to wait for the end of the thread, which does not end if the store's host is gone.
_CLOSE_SECONDS = 2.0
#: Number of reads of the store after which two waiting ranks have certainly compared their calls.
_PATIENT_LOOKS = 3
#: Number of ranks after it with which each rank compares its calls; differences show between neighbours.
_COMPARED = 8
#: Seconds between two heartbeats of a rank that `lockstep run` did not start.
EVERY = 5.0
#: Seconds without a heartbeat after which a rank counts as lost. Code that keeps the interpreter's lock for
#: long, such as reading one huge JSON file, also delays heartbeats.
SILENCE = 120.0
#: Seconds of silence that one read adds, at most: this process itself may have been stopped before it.
_LONGEST_LOOK = 2 * EVERY


class Watchdog(Listener):
    """Thread that ends this rank if it waits in another loop or collective call than other ranks.

    Ranks write to the key-value store where they wait, and the thread reads it. Before the thread ends the
    process, it calls `fail` with the error and the current line of the script; by default `fail` reports
    both to the launcher. The thread regularly calls the functions in `also`, such as one that looks for
    requests in the store.
    """

    def __init__(
        self,
        rendezvous: RankRendezvous,
        heartbeat: Heartbeat,
        fail: Callable[[LockstepError, stacks.Frame | None], None] | None = None,
    ) -> None:
        # A separate client of the store for the thread, as the main thread's may be blocked in a wait.
        own: dist.Store = rendezvous.store.clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("watch", rendezvous.store)
        self._thread_store = dist.PrefixStore("watch", own)
        self._rendezvous = replace(rendezvous, store=own)
        self._heartbeat = heartbeat
        # Whether several launchers started the ranks: none of them sees the progress of all ranks.
        self._several = rendezvous.world.launch_file is None
        self._rank, size = rendezvous.world.rank, rendezvous.world.size
        self._others = _after(self._rank, range(size))
        # `lockstep run` itself detects ranks whose processes have ended.
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

    def loop_begins(self, loop: LoopKey) -> None:
        """Record that a loop over a loader begins; the watchdog compares loops between ranks."""
        self._outer.append((self._loop, self._collectives))
        self._loops += 1
        # Not the number of the loop: the main rank may loop over a further loader alone.
        self._loop = f"{loop.loader}.{loop.epoch}.{loop.round}"
        self._step = self._collectives = 0

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Record the beginning of a microbatch."""
        self._step = microbatch.step
        self._leave_backward()

    def backward_begins(self, microbatch: Microbatch, models: Sequence[int]) -> None:
        """Note that a backward pass begins, if `microbatch` is the last of this rank's batch.

        Only that pass counts as a collective call. `models`: numbers of the models whose gradients it
        computes.
        """
        if microbatch.last:
            batch = (*microbatch.loop, microbatch.step, microbatch.turn)
            self._heartbeat.enter("run.backward", (*batch, *models))
            self._in_backward = True

    def backward_ends(self) -> None:
        """Record the end of the backward pass that `backward_begins` recorded, if there is one.

        This is the backward pass in this rank's last microbatch. It counts as one collective call.
        """
        if self._in_backward:
            self._collectives += 1
            self._leave_backward()

    def _leave_backward(self) -> None:
        """Record that this rank is in no backward pass, also after an exception in the pass."""
        if self._in_backward:
            self._heartbeat.leave()
            self._in_backward = False

    @contextlib.contextmanager
    def passing(self, row: range) -> Iterator[None]:
        """Return a context whose body computes a model that is distributed over the ranks in `row`.

        In the body the watchdog detects that one of these ranks has ended its loop or its run.
        """
        before, self._row = self._row, row
        try:
            yield
        finally:
            self._row = before

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        """Write to the key-value store that this rank has ended a loop, and after which batch.

        The arguments are those of `Listener.loop_ends`.
        """
        self._leave_backward()
        self._store.set(f"{self._loop}/{self._rank}", f"{step} {self._collectives} {early:d}")
        self._loop, self._collectives = self._outer.pop()

    def run_ends(self) -> None:
        """Write to the key-value store that this rank has ended its run and begins no further loop."""
        self._store.set(f"end/{self._rank}", f"{self._loops} 0 1")

    # --- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, wakes = -1, 0
        while not self._stop.wait(_LOOK_SECONDS / 2):
            wakes += 1
            # Called twice as often, since ranks agree on a preemption only after two calls.
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
        except Exception as error:  # the thread continues, since it also serves saving and stopping
            if not self._warned:
                self._warned = True
                what = f"{type(error).__name__}: {error}"
                sys.stderr.write(f"lockstep: warning: the watchdog of rank {self._rank}: {what}\n")

    def _look(self) -> None:
        if self._pulse is not None:
            self._pulse.beat()
        if self._several:  # a launcher sees only its own ranks, which may wait for others' progress
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
        row = self._row  # read once, as the main thread may change it
        if self._in_backward:
            self._compare_loops(self._others)
        elif row:
            self._compare_loops(_after(self._rank, row))
        if self._heartbeat.waits:
            self._compare_calls()

    def _compare_loops(self, others: Sequence[int]) -> None:
        """End this waiting rank with an error if a rank in `others` has ended its loop or its run."""
        for other in others:
            left = self._read(f"{self._loop}/{other}")
            ended = self._read(f"end/{other}")
            # If another rank has finished its loop and waits in another call, the comparison of calls gives
            # the clearer error, and so comes first.
            counts = left is not None and (left[2] or self._looks > _PATIENT_LOOKS)
            if left is not None and counts and left[1] <= self._collectives:
                self._end_early(
                    f"rank {other} left this loop in batch {left[0]}, "
                    f"rank {self._rank} waits for it in batch {self._step}"
                )
            # A rank that has made this call already may end while its messages are still on a slow link.
            has_sent = left is not None and left[1] > self._collectives
            if ended is not None and not has_sent:
                self._end_early(
                    f"rank {other} ended after {ended[0]} loops over loaders, "
                    f"rank {self._rank} waits for it in loop {self._loops}"
                )

    def _compare_calls(self) -> None:
        """End this waiting rank with an error if another rank waits in a different collective call."""
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
            # Whether the other rank is in the same call as when this rank last read it.
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
            return  # the main thread no longer waits, and is closing the run
        # Only the script's frames: those of Lockstep and torch add nothing.
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
        """Stop the watchdog's thread; wait a short time for its end."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)


class Liveness:
    """Signs of life between ranks that were not started by `lockstep run`, in the key-value store.

    Each rank periodically writes a counter and reads the counter of the next rank, so that the cost does
    not grow with the number of ranks. If the counter that it reads stays the same for too long, the reading
    rank fails.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank = store, (rank + 1) % size
        self._own, self._next = f"alive/{rank}", f"alive/{self._rank}"
        self._beats, self._latest, self._silent = 0, b"", 0.0
        self._looked = time.monotonic()

    def beat(self) -> None:
        """Increase this rank's counter in the store, and read the next rank's counter.

        A call within `EVERY` seconds after the previous reading does nothing.
        """
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
        """Return an error if the next rank's counter has not changed for `SILENCE` seconds.

        Else return `None`.
        """
        if self._silent < SILENCE:
            return None
        return PeerError(
            f"rank {self._rank} gives no sign of life for {self._silent:.0f} s; "
            f"expected one every {EVERY:.0f} s",
            hint="it was killed or stopped, or its machine is lost: look there, and at its log",
        )


def _after(rank: int, ranks: range) -> list[int]:
    """Return up to `_COMPARED` ranks of `ranks`, beginning after `rank`.

    After the last of the ranks follows the first.
    """
    index, size = ranks.index(rank), len(ranks)
    return [ranks[(index + ahead) % size] for ahead in range(1, min(size, _COMPARED + 1))]


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)
