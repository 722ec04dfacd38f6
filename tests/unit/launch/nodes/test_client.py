"""Launchers that watch each other over the network: one decision for all of them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lockstep.launch.agent.failure import Decision, FailureReport, Verdict
from lockstep.launch.nodes import client, coordinator, server
from lockstep.launch.nodes.client import CoordinatorClient
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.server import CoordinatorServer, ServerAddress
from tests.unit.threads import Party, together

Maker = Callable[..., CoordinatorClient]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(client, "_REFUSED_SECONDS", 0.2)
    monkeypatch.setattr(server, "_LINGER_SECONDS", 0.3)


@pytest.fixture
def make() -> Iterator[Maker]:
    """Make launchers of a launch, launcher 0 first; they have ended when the test has."""
    made: list[CoordinatorClient] = []
    listening = CoordinatorServer(loopback=True)

    def one(
        index: int, count: int = 3, *, speaks: bool = True, **settings: Any
    ) -> CoordinatorClient:
        at = listening.address if index else listening
        made.append(CoordinatorClient(membership(index, count, speaks=speaks), at, **settings))
        return made[-1]

    yield one
    for launcher in reversed(made):
        launcher.close()
        launcher._thread.join(5)
        assert not launcher._thread.is_alive()
    listening.close()


def end(launcher: CoordinatorClient) -> None:
    """End as a launcher does."""
    launcher.close()
    if launcher.server is not None:
        launcher.server.close()


def place_of(first: CoordinatorClient) -> ServerAddress:
    assert first.server is not None
    return first.server.address


def membership(index: int, count: int, *, speaks: bool = True) -> Membership:
    return Membership(
        index=index,
        ranks=(1,) * count,
        nodes=tuple(range(count)),
        names=tuple(f"node {k} (host{k})" for k in range(count)),
        address="127.0.0.1",
        interface=None,
        speaks=speaks,
    )


def verdict(rank: int) -> Verdict:
    return Verdict(
        text=f"rank {rank} failed", exit_code=1, name=f"rank {rank}", traceback="Traceback …"
    )


def cause(rank: int) -> FailureReport:
    return FailureReport(verdict=verdict(rank), consequence=False, time=1.0)


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> bool:
    """Wait until a condition holds, `seconds` at most; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def decision_of(launcher: CoordinatorClient, seconds: float = 5) -> Decision | None:
    wait_until(lambda: launcher.decision is not None, seconds)
    return launcher.decision


def problem_of(launcher: CoordinatorClient) -> Verdict | None:
    decision = decision_of(launcher)
    return None if decision is None else decision.verdict


def go_on() -> None:
    pass


def enter_all(
    launchers: list[CoordinatorClient], generation: int, ports: Iterator[int]
) -> list[Any]:
    """Let all launchers enter a generation at once; the store's port is the next of `ports`."""
    return together(
        *(partial(one.enter, generation, lambda: next(ports), go_on) for one in launchers)
    )


@pytest.fixture
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are made from here on let three strangers in, for a minute."""
    monkeypatch.setattr(server, "_UNKNOWN", 3)
    monkeypatch.setattr(server, "_GREETING_SECONDS", 60)


@pytest.mark.usefixtures("room_for_three")
def test_a_bounded_number_of_strangers_is_let_in(make: Maker) -> None:
    first = make(0, 2)
    strangers = [socket.create_connection(("127.0.0.1", place_of(first).port)) for _ in range(12)]
    try:
        for one in strangers[3:]:  # those that came first may say who they are
            one.settimeout(5)
            assert one.recv(1) == b""
        for one in strangers[:3]:
            one.settimeout(0.1)
            with pytest.raises(TimeoutError):
                one.recv(1)
            one.close()
        second = make(1, 2)
        second.fail(cause(1))
        assert problem_of(second) is not None, "there is room again for a launcher"
    finally:
        for one in strangers:
            one.close()


def test_a_stranger_that_sends_slowly_is_closed(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_GREETING_SECONDS", 0.3)
    first, sent = make(0, 2), 0
    with socket.create_connection(("127.0.0.1", place_of(first).port)) as stranger:
        stranger.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            for sent in range(len(place_of(first).start)):
                stranger.send(place_of(first).start[sent : sent + 1])
                with contextlib.suppress(TimeoutError):
                    if not stranger.recv(1):
                        break
    assert sent < len(place_of(first).start) - 1
    second = make(1, 2)
    verdict_of_1 = replace(verdict(1), traceback="x" * (1 << 16))
    second.fail(FailureReport(verdict=verdict_of_1, consequence=False, time=1.0))
    assert problem_of(first) == verdict_of_1, "a launcher's first message may be long"


class Launcher:
    """A launcher's thread, which makes one call and then stands still, or looks again and again."""

    def __init__(self, make: Callable[[], CoordinatorClient], *, moves: bool) -> None:
        self._release, self._made = threading.Event(), threading.Event()
        self._make, self._moves = make, moves
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._made.wait(10)

    def _run(self) -> None:
        self.own = self._make()
        self._made.set()
        while not self._release.wait(0.02 if self._moves else 60):
            pass

    def end(self) -> None:
        self._release.set()
        self._thread.join(10)


@pytest.mark.parametrize("stuck", [0, 1, None])
def test_a_launcher_whose_thread_is_stuck_is_lost(
    stuck: int | None, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_STUCK_SECONDS", 0.5)
    monkeypatch.setattr(client, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(coordinator, "LOST_SECONDS", 1.0)
    both = [Launcher(partial(make, index, 2), moves=index != stuck) for index in range(2)]
    try:
        told = decision_of(both[0 if stuck else 1].own, 10 if stuck is not None else 3)
    finally:
        for one in both:
            one.end()
    if stuck is None:
        assert told is None
    else:
        assert told is not None, "its heartbeat came from a thread that proves nothing"
        assert told.verdict is not None
        assert f"node {stuck} (host{stuck}) was lost" in told.verdict.text


# All goes well.


@pytest.mark.parametrize("count", [1, 2, 3])
def test_generations_and_a_good_end(count: int, make: Maker) -> None:
    launchers = [make(index, count) for index in range(count)]
    ports = iter(range(1000, 2000))
    assert enter_all(launchers, 0, ports) == [1000] * count, "one opens, once"
    for one in launchers[:-1]:
        one.done()
    time.sleep(0.1)
    assert not any(one.decision for one in launchers[:-1]) or count == 1
    launchers[-1].done()
    assert [decision_of(one) for one in launchers] == [Decision(kind="done")] * count


# One fails.


def test_a_failure_that_may_pass_starts_all_again(make: Maker) -> None:
    lines = iter(["rank 1 was killed; restart 1", None])
    launchers = [make(k, policy=lambda _: next(lines)) for k in range(3)]
    ports = iter(range(1000, 2000))
    assert enter_all(launchers, 0, ports) == [1000] * 3
    launchers[1].fail(cause(1))
    restart = Decision(kind="restart", text="rank 1 was killed; restart 1")
    assert [decision_of(one) for one in launchers] == [restart] * 3
    assert enter_all(launchers, 1, ports) == [1001] * 3
    assert [one.decision for one in launchers] == [None] * 3
    launchers[2].fail(cause(2))
    assert [problem_of(one) for one in launchers] == [verdict(2)] * 3


def test_only_one_launcher_speaks_where_they_share_their_output(make: Maker) -> None:
    first, second = make(0, 2), make(1, 2, speaks=False)
    second.fail(cause(1))
    assert problem_of(first) == verdict(1)
    assert problem_of(second) == replace(verdict(1), text="")


# One is lost.


@pytest.fixture
def lost_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "LOST_SECONDS", 0.6)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, "end"), ({"least": 1}, "round"), ({"least": 1, "hint": "file://"}, "end")],
)
def test_launcher_0_that_has_ended_is_lost(
    settings: dict[str, Any], kind: str, make: Maker
) -> None:
    first, second = make(0, 3), make(1, 3, **settings)
    time.sleep(0.1)
    end(first)
    decision = decision_of(second)
    assert decision is not None
    assert decision.kind == kind
    assert decision.verdict is not None
    assert "node 0 (host0) was lost: its launcher has ended" in decision.verdict.text
    assert ("hint: file://" in decision.verdict.text) == ("hint" in settings)
    assert second.has_lost_coordinator
    if kind == "round":
        assert decision.staying == (1, 2)


def test_launcher_0_that_says_nothing_is_lost(lost_soon: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = ServerAddress(port=listener.getsockname()[1], token="")
        one = CoordinatorClient(membership(1, 2), place)
        found = problem_of(one)
        one.close()
    assert found is not None
    assert "node 0 (host0) was lost: no sign" in found.text


def test_a_cut_of_a_moment_loses_nobody(make: Maker, lost_soon: None) -> None:
    """What is on its way is lost, and another connection goes through."""
    first, second = make(0, 2), make(1, 2)
    assert enter_all([first, second], 0, iter([7])) == [7, 7]
    assert first.server is not None
    first.server._lock.acquire()  # as if nothing came back
    time.sleep(0.4)
    first.server._lock.release()
    time.sleep(0.8)
    assert first.decision is second.decision is None


# Strangers.


def test_strangers_change_nothing(make: Maker) -> None:
    first, second = make(0, 2), make(1, 2)
    token = place_of(first).token
    for line in (
        b"GET / HTTP/1.0\r\n\r\n",
        b'{"token": "wrong", "report": {}}\n',
        f'{{"token": "{token}", "report": {{"index": 5}}}}\n'.encode(),
        f'{{"token": "{token}"}}\n'.encode(),
        b"[" * 100_000 + b"\n",
        b"\xff\0\n",
        b"",
    ):
        with socket.create_connection(("127.0.0.1", place_of(first).port)) as stranger:
            stranger.settimeout(2)
            with contextlib.suppress(OSError):  # it is closed after the first bytes
                stranger.sendall(line)
                stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # what it sent was not read to the end
                assert stranger.recv(100) == b""
    assert enter_all([first, second], 0, iter([7])) == [7, 7]


def test_a_ping_is_answered(make: Maker) -> None:
    first = make(0, 2)
    place = replace(place_of(first), addresses=("nosuch.invalid", "127.0.0.1"))
    assert place.answers()
    assert not replace(place, token="wrong").answers()
    end(first)
    assert not place.answers()


def test_who_asks_before_the_round_has_begun_waits(make: Maker) -> None:
    first, second = make(0, 2), make(1, 2, number=2)
    second.done()
    time.sleep(0.2)
    assert first.decision is second.decision is None
    assert first.server is not None
    again = CoordinatorClient(membership(0, 2), first.server, number=2)
    again.done()
    assert decision_of(second) == decision_of(again) == Decision(kind="done")
    again.close()


# The end.


def test_launcher_0_stays_until_the_others_have_heard(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LINGER_SECONDS", 5.0)
    first, second = make(0, 2), make(1, 2)
    assert enter_all([first, second], 0, iter([7])) == [7, 7]
    hearing = threading.Event()
    store = second._store
    second._store = lambda answer: store(answer) if hearing.is_set() else None  # type: ignore[method-assign]
    first.fail(cause(0))
    assert problem_of(first) == verdict(0)
    closing = Party(first.close)
    assert isinstance(closing.end(0.1), TimeoutError), "it waits"
    hearing.set()
    assert closing.end() is None
    assert problem_of(second) == verdict(0)
