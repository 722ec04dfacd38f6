"""`CoordinatorClient`: sends reports on this launcher's workers, and receives common decisions.

    launcher k: report ──> launcher 0: coordinator ──> decision

A thread sends and receives, so that a slow network does not block the launcher. Launcher 0 answers each
report, and sends each new decision at once. A connection without an answer is replaced after two seconds:
TCP would retransmit at growing intervals, and ten seconds without a network would look like a dead host.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lockstep.errors import shortened
from lockstep.launch.agent.failure import Decision, FailureReport, Policy
from lockstep.launch.nodes import coordinator
from lockstep.launch.nodes.coordinator import Coordinator, beat_seconds, lost_verdict
from lockstep.launch.nodes.lines import READ, LineReader, Waker
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.messages import Answer, LauncherReport, shortened_failure
from lockstep.launch.nodes.server import CoordinatorServer, ServerAddress
from lockstep.world.rendezvous.decode import decode
from lockstep.world.waiting import Check

#: Seconds between two looks of launcher 0, which makes decisions for all.
_INTERVAL = 0.02
#: Seconds without an answer after which the client opens another connection.
_ANSWER_SECONDS = 2.0
_CONNECT_SECONDS = 1.0
#: Seconds without a context switch of the main thread, which then is inside a blocked system call, after
#: which the client stops sending reports. No system call of the launcher takes as long by design.
_STUCK_SECONDS = 120.0
#: Seconds between two reads of the main thread's context switches, and the maximum that counts between two
#: reads: the whole process may have been stopped.
_LOOK_SECONDS = 1.0
_LONGEST_LOOK = 5.0
#: Seconds of refused connections after which launcher 0 counts as ended.
_REFUSED_SECONDS = 1.5


class RoundOverError(Exception):
    """Raised if the rendezvous round of a launcher ended while the launcher waited.

    Attribute `decision` is the decision that ended the round.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision


class CoordinatorClient:
    """Client with which a launcher reports to launcher 0 and receives decisions for all launchers.

    The reports also serve as heartbeats.

    Args:
        membership: the launchers and their ranks.
        at: address of launcher 0; on launcher 0, the server object itself.
        number: number of the rendezvous round.
        generation: number of the round's first start of workers.
        policy: restart policy, applied on launcher 0.
        least: minimum number of launchers of an elastic launch; `None` for a fixed size.
        hint: hint for the error about a lost launcher 0; `None` if the launch survives the loss.
    """

    def __init__(
        self,
        membership: Membership,
        at: CoordinatorServer | ServerAddress,
        *,
        number: int = 1,
        generation: int = 0,
        policy: Policy = lambda _: None,
        least: int | None = None,
        hint: str | None = None,
    ) -> None:
        self._membership, self._number = membership, number
        self._least = least
        self._hint = hint
        self._lock = threading.Lock()
        self._report = LauncherReport(index=membership.index, round=number, generation=generation)
        self._answer = Answer()
        self._stop = threading.Event()
        self._main_thread = ThreadActivity()
        self.server = at if isinstance(at, CoordinatorServer) else None
        self._connection = (
            _Connection(membership.address, at) if isinstance(at, ServerAddress) else None
        )
        #: Coordinator of this round; used on launcher 0 only.
        self._own = Coordinator(
            membership, time.monotonic(), policy=policy, least=least, generation=generation
        )
        if self.server is not None:
            self.server.begin(number, self._own)
        self._thread = threading.Thread(
            target=self._run, name="lockstep-coordinator-client", daemon=True
        )
        self._thread.start()

    def fail(self, failure: FailureReport) -> None:
        """Report that this launcher's workers failed."""
        self._update(failure=shortened_failure(failure))

    def done(self) -> None:
        """Report that this launcher's workers have succeeded."""
        self._update(done=True)

    def leave(self, why: str, *, saves: bool = False) -> None:
        """Report that this launcher leaves, for the reason `why`; an elastic launch continues without it.

        With `saves`, all ranks first save the run's state if too few launchers would stay.
        """
        why = shortened(why)
        if (self._report.leaves, self._report.saves) != (why, saves):
            self._update(leaves=why, saves=saves)

    @property
    def saves(self) -> bool:
        """Whether launcher 0 has answered that all ranks are to save the run's state and exit."""
        return self._answer.saves

    def enter(self, generation: int, open_store: Callable[[], int], check: Check) -> int:
        """Wait until all launchers have stopped their workers; return the port of the new store.

        Args:
            generation: number of the next start of workers.
            open_store: function that hosts the store of the new workers and returns its port;
                called on launcher 0 only.
            check: called repeatedly during the wait; may raise to end it.

        Raises:
            RoundOverError: if the rendezvous round ends instead.
        """
        with self._lock:
            index = self._membership.index
            self._report = LauncherReport(index=index, round=self._number, generation=generation)
            self._answer = Answer()
        if self.server is not None:
            with self.server.locked(self._number):
                self._own.enter(generation)
        self._wake()
        opened = False
        while True:
            check()
            decision, port = self.decision, self._answer.port
            if decision is not None and decision.is_last:
                raise RoundOverError(decision)
            if port:
                return port
            if self.server is not None and not opened and self._own.all_entered:
                opened = True
                port = open_store()
                with self.server.locked(self._number):
                    self._own.open(port)
            time.sleep(_INTERVAL)

    @property
    def decision(self) -> Decision | None:
        """Newest decision of launcher 0; `None` if there is none.

        If launcher 0 is lost, the decision of this launcher: to end, or to begin another rendezvous round.
        """
        decision = self._answer.decision
        why = None if self._connection is None else self._connection.lost
        if decision is None and why is not None:
            verdict = lost_verdict(self._membership.names[0], why, hint=self._hint)
            decision = Decision(kind="end", verdict=verdict)
            if self._least is not None and self._hint is None:
                staying = tuple(range(1, self._membership.count))
                text = verdict.text.removeprefix("lockstep: ")
                decision = replace(decision, kind="round", text=text, staying=staying)
        if decision is None or decision.verdict is None or self._membership.speaks:
            return decision
        return replace(decision, verdict=replace(decision.verdict, text=""))

    @property
    def has_lost_coordinator(self) -> bool:
        """Whether launcher 0 was lost before this launcher received a decision."""
        connection = self._connection
        return self._answer.decision is None and connection is not None and bool(connection.lost)

    def close(self) -> None:
        """Stop the heartbeats; on launcher 0, wait until all launchers have received the last decision."""
        self._stop.set()
        self._wake()
        self._thread.join(_ANSWER_SECONDS + _CONNECT_SECONDS + 0.5)
        if self.server is not None:
            self.server.linger(self._number)

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._report = replace(self._report, **changes)
        self._wake()

    def _wake(self) -> None:
        if self._connection is not None:
            self._connection.waker.wake()

    def _run(self) -> None:
        while not (self._stop.is_set() or self._is_over):
            stuck = self._main_thread.is_stuck()
            if self.server is not None:
                self.server.is_silent = stuck
                if not stuck:
                    self._store(self.server.receive(self._report))
                self._stop.wait(_INTERVAL)
            else:
                self._exchange(silent=stuck)
        if not self._is_over:
            self._report_last()
        if self._is_over:
            self._update(heard=True)
            self._report_last()
        if self._connection is not None:
            self._connection.end()

    @property
    def _is_over(self) -> bool:
        decision = self._answer.decision
        return decision is not None and decision.is_last

    def _exchange(self, *, silent: bool) -> None:
        """Send this launcher's report, and store answers until the next report is due.

        The next report is due if its content changes, or after the heartbeat interval. `silent` is whether
        the main thread is blocked; in this case no report is sent, but answers are still stored.
        """
        connection = self._connection
        assert connection is not None, "this is not launcher 0"
        if not silent:
            connection.send(asdict(self._report))
        due = time.monotonic() + beat_seconds(self._membership.count)
        while (now := time.monotonic()) < due and not self._is_over:
            if connection.socket is None:
                due = min(due, now + coordinator.BEAT_SECONDS)
            if self._receive(connection, due - now):
                return

    def _report_last(self) -> None:
        """Send this launcher's last report, and wait for its answer; called after the last heartbeat."""
        connection = self._connection
        if connection is None:
            assert self.server is not None, "a launcher has a connection or the server"
            self._store(self.server.receive(self._report))
            return
        connection.send(asdict(self._report))
        while connection.asked is not None:
            self._receive(connection, _ANSWER_SECONDS)

    def _receive(self, connection: _Connection, seconds: float) -> bool:
        """Wait up to `seconds` for the coordinator's answers, and store them.

        Return whether this launcher has a new report to send.
        """
        changed, answers = connection.receive(seconds)
        for fields in answers:
            self._store(decode(Answer, fields))
        return changed

    def _store(self, answer: Answer) -> None:
        with self._lock:
            # Ignore answers to reports from before the last restart.
            if answer.generation == self._report.generation:
                self._answer = answer


class ThreadActivity:
    """Detects whether the thread that constructed this object is blocked in a system call.

    An active thread waits often, and `/proc` counts each wait as a voluntary context switch. A thread
    inside a call to a file server that does not answer makes none.
    """

    def __init__(self) -> None:
        self._status = Path(f"/proc/self/task/{threading.get_native_id()}/status")
        self._switches = ""
        self._looked = time.monotonic()
        self._still = 0.0

    def is_stuck(self) -> bool:
        """Return whether the thread was blocked for the last two minutes; call this every second."""
        passed = time.monotonic() - self._looked
        if passed >= _LOOK_SECONDS:
            self._looked += passed
            before, self._switches = self._switches, ""
            with contextlib.suppress(OSError):  # the thread has ended
                status = self._status.read_text()
                self._switches = status.partition("\nvoluntary_ctxt_switches:")[2]
            moves = self._switches != before
            self._still = 0.0 if moves else self._still + min(passed, _LONGEST_LOOK)
        return self._still > _STUCK_SECONDS


class _Connection:
    """TCP connection to launcher 0, opened anew after an error or timeout."""

    def __init__(self, host: str, address: ServerAddress) -> None:
        self._host, self._address = host, address
        #: The socket, while there is a connection as far as this end knows.
        self.socket: socket.socket | None = None
        self._reader = LineReader()
        #: Ends a wait for answers, because the report has changed.
        self.waker, self._selector = Waker(), selectors.DefaultSelector()
        self._selector.register(self.waker.reader, selectors.EVENT_READ)
        self._heard = time.monotonic()
        #: Time of the first report on this connection that has no answer yet.
        self.asked: float | None = None
        self._refused: float | None = None

    def send(self, report: dict[str, Any]) -> None:
        """Send a report; close the connection after an error or timeout."""
        text = json.dumps({"token": self._address.token, "report": report})
        try:
            connection = self.socket or self._open()
            connection.sendall(text.encode() + b"\n")
        except ConnectionRefusedError:
            self._refused = self._refused or time.monotonic()
            self.close()
        except OSError:
            self.close()
        else:
            self.asked = self.asked or time.monotonic()

    def _open(self) -> socket.socket:
        end = (self._host, self._address.port)
        self.socket = opened = socket.create_connection(end, timeout=_CONNECT_SECONDS)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.settimeout(_ANSWER_SECONDS)
        self._selector.register(opened, selectors.EVENT_READ)
        self._reader = LineReader()
        return opened

    def receive(self, seconds: float) -> tuple[bool, list[dict[str, Any]]]:
        """Wait up to `seconds` for answers of the coordinator to reports of this launcher.

        The wait ends early if the launcher has a new report to send. Return whether it has one, and the
        answers that have come. The connection is closed after an error, or if a report has had no answer
        for some seconds.
        """
        if self.asked is not None:
            seconds = min(seconds, self.asked + _ANSWER_SECONDS - time.monotonic())
        ready = [key.fileobj for key, _ in self._selector.select(max(seconds, 0))]
        answers: list[dict[str, Any]] = []
        if self.socket in ready:
            answers = self._read(self.socket)
        if answers:
            self._heard, self.asked, self._refused = time.monotonic(), None, None
        elif self.asked is not None and time.monotonic() - self.asked >= _ANSWER_SECONDS:
            self.close()
        changed = self.waker.reader in ready
        if changed:
            self.waker.clear()
        return changed, answers

    def _read(self, connection: socket.socket) -> list[dict[str, Any]]:
        try:
            data = connection.recv(READ)
            if not data:
                raise ConnectionAbortedError
            return [json.loads(line) for line in self._reader.feed(data)]
        except (OSError, ValueError):
            self.close()
            return []

    @property
    def lost(self) -> str | None:
        """Reason why launcher 0 counts as lost; `None` while it answers."""
        now, refused = time.monotonic(), self._refused
        if refused is not None and now - refused > _REFUSED_SECONDS:
            return "its launcher has ended"
        if now - self._heard > coordinator.LOST_SECONDS:
            return f"no sign of its launcher for {coordinator.LOST_SECONDS:.0f} s"
        return None

    def close(self) -> None:
        """Close the socket; the next report opens another."""
        self.asked = None
        if self.socket is not None:
            with contextlib.suppress(KeyError):  # it was not opened completely
                self._selector.unregister(self.socket)
            self.socket.close()
            self.socket = None

    def end(self) -> None:
        """Close the connection, the selector and the waker; this object cannot be used again."""
        self.close()
        self._selector.close()
        self.waker.close()
