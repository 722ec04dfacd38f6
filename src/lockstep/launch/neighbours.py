"""The other launchers while the workers run: who failed, who is lost, and one verdict for all.

    launcher k: failure ──> launcher 0: verdict ──> all launchers

A thread talks to the store, since a store that is gone answers late; the launcher only looks at what
the thread has found.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from lockstep.launch.failure import Verdict
from lockstep.launch.roster import Roster

_BEAT_SECONDS = 1.0
_INTERVAL = 0.05
#: A launcher that has not moved for as long is lost.
_LOST_SECONDS = 15.0
#: How long launcher 0 waits for the cause, once it has heard of a consequence.
_SETTLE_SECONDS = 2.0
#: How long launcher 0 waits for the others to read its verdict.
_LINGER_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a launcher says of its own failure.

    Attributes:
        verdict: its verdict.
        consequence: whether another rank's failure explains it.
        time: when it happened, seconds since the epoch.
    """

    verdict: Verdict
    consequence: bool
    time: float

    @property
    def order(self) -> tuple[bool, float]:
        """What sorts causes before consequences, and early before late."""
        return self.consequence, self.time


class Neighbours:
    """What this launcher knows of the others, and they of it.

    Args:
        store: the store of this generation, which launcher 0 hosts.
        roster: who they are.
    """

    def __init__(self, store: dist.TCPStore, roster: Roster) -> None:
        # Clients of their own: the launcher's may be busy waiting.
        self._store = dist.PrefixStore("neighbours", _clone(store))
        self._linger_store = dist.PrefixStore("neighbours", _clone(store))
        self._roster = roster
        self._own = f"{roster.index}"
        self._lock = threading.Lock()
        self._failure: Told | None = None
        self._done = False
        self._heard = time.monotonic()
        #: The verdict over the whole launch, once there is one.
        self.verdict: Verdict | None = None
        #: Whether all launchers have ended well.
        self.all_done = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="lockstep-neighbours", daemon=True)
        self._thread.start()

    def fail(self, told: Told) -> None:
        """Tell the others that this launcher's workers failed."""
        with self._lock:
            self._failure = told

    def done(self) -> None:
        """Tell the others that this launcher's workers ended well."""
        with self._lock:
            self._done = True

    @property
    def problem(self) -> Verdict | None:
        """The verdict, where there is one: of the launch, or that launcher 0 is lost."""
        if self.verdict is not None:
            return self.verdict
        if time.monotonic() - self._heard > _LOST_SECONDS:
            return _lost(self._roster.names[0])
        return None

    def close(self) -> None:
        """Stop talking; launcher 0, who hosts the store, after the others have read its last word."""
        said_something = self._failure is not None or self.verdict is not None or self.all_done
        if self._roster.index == 0 and said_something:
            self._await_readers()
        self._stop.set()
        self._thread.join(timeout=2 * _BEAT_SECONDS)

    def _talk(self) -> None:
        talk = _Main(self._roster) if self._roster.index == 0 else None
        beat = 0
        # A store that is gone is noticed by the silence.
        with contextlib.suppress(dist.DistError, RuntimeError):
            while not self._stop.is_set():
                beat += 1
                self._say(beat)
                if talk is not None:
                    talk.decide(self._store)
                self._listen()
                self._heard = time.monotonic()
                self._stop.wait(_INTERVAL if self._failure or self._done else _BEAT_SECONDS / 4)

    def _await_readers(self) -> None:
        deadline = time.monotonic() + _LINGER_SECONDS
        readers = [f"read/{index}" for index in range(1, self._roster.count)]
        with contextlib.suppress(dist.DistError, RuntimeError):
            while not self._linger_store.check(readers) and time.monotonic() < deadline:
                time.sleep(_INTERVAL)

    def _say(self, beat: int) -> None:
        with self._lock:
            failure, done = self._failure, self._done
        said = {
            "beat": beat,
            "done": done,
            "failure": None if failure is None else asdict(failure),
        }
        self._store.set(self._own, json.dumps(said))

    def _listen(self) -> None:
        if self._store.check(["verdict"]):
            verdict = Verdict(**json.loads(self._store.get("verdict")))
            self.verdict = verdict if self._roster.speaks else replace(verdict, text="")
        elif self._store.check(["all done"]):
            self.all_done = True
        else:
            return
        self._store.set(f"read/{self._own}", "1")
        self._stop.set()


class _Main:
    """Launcher 0's part: it looks at all of them and decides."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._beats: dict[int, tuple[int, float]] = {}
        self._first_heard: float | None = None
        self._decided = False

    def decide(self, store: dist.Store) -> None:
        """Look at what all launchers say; write the verdict, or that all is done."""
        if self._decided:
            return
        now = time.monotonic()
        said = {
            index: json.loads(store.get(str(index)))
            for index in range(self._roster.count)
            if store.check([str(index)])
        }
        told = [_told(one["failure"]) for one in said.values() if one["failure"] is not None]
        lost = self._lost(said, now)
        if told:
            self._judge(store, told, now)
        elif lost is not None:
            self._write(store, _lost(self._roster.names[lost]))
        elif len(said) == self._roster.count and all(one["done"] for one in said.values()):
            store.set("all done", "1")
            self._decided = True

    def _judge(self, store: dist.Store, told: list[Told], now: float) -> None:
        self._first_heard = self._first_heard or now
        first = min(told, key=lambda one: one.order)
        everybody = len(told) == self._roster.count
        if everybody or not first.consequence or now - self._first_heard > _SETTLE_SECONDS:
            self._write(store, first.verdict)

    def _lost(self, said: dict[int, dict[str, Any]], now: float) -> int | None:
        for index in range(self._roster.count):
            beat = said[index]["beat"] if index in said else 0
            last, since = self._beats.get(index, (-1, now))
            self._beats[index] = (beat, now if beat != last else since)
            if now - self._beats[index][1] > _LOST_SECONDS:
                return index
        return None

    def _write(self, store: dist.Store, verdict: Verdict) -> None:
        store.set("verdict", json.dumps(asdict(verdict)))
        self._decided = True


def _clone(store: dist.TCPStore) -> dist.Store:
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone


def _told(said: dict[str, Any]) -> Told:
    return Told(
        verdict=Verdict(**said["verdict"]), consequence=said["consequence"], time=said["time"]
    )


def _lost(name: str) -> Verdict:
    return Verdict(
        text=f"lockstep: {name} was lost: no sign of its launcher for {_LOST_SECONDS:.0f} s",
        exit_code=1,
        rank=-1,
        traceback=None,
    )
