"""The coordinator's server: messages of many launchers, and a host that is short of descriptors."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Self

import pytest

from lockstep.launch.agent.failure import Decision
from lockstep.launch.nodes import server
from lockstep.launch.nodes.coordinator import Coordinator
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.messages import LINE, Answer, LauncherReport
from lockstep.launch.nodes.server import CoordinatorServer
from lockstep.world.rendezvous.decode import decode
from tests.unit.world.rendezvous.test_port_discovery import Crowded


def test_too_many_open_files_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = Crowded(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    monkeypatch.setattr(server.network, "listen", lambda *_, **__: crowded)
    one = CoordinatorServer(loopback=True)
    assert one.address.answers()
    assert crowded.left == 0
    one.close()


# Messages over sockets.


class Launcher:
    """A connection that sends and receives bytes as a launcher does."""

    def __init__(self, at: CoordinatorServer, index: int = 1) -> None:
        self._address, self._index = at.address, index
        self.socket = socket.create_connection(("127.0.0.1", at.address.port), timeout=5)
        self._reader = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        self.socket.close()

    def line(self, **changes: Any) -> bytes:
        report = LauncherReport(**{"index": self._index, "generation": 0, **changes})
        return json.dumps({"token": self._address.token, "report": asdict(report)}).encode() + b"\n"

    def receive(self) -> Answer:
        return decode(Answer, json.loads(self._reader.readline()))


def coordinator(count: int) -> Coordinator:
    members = Membership(
        index=0,
        ranks=(1,) * count,
        nodes=tuple(range(count)),
        names=tuple(f"node {k}" for k in range(count)),
        address="127.0.0.1",
        interface=None,
    )
    return Coordinator(members, time.monotonic(), policy=lambda _: None, least=1, generation=0)


@pytest.fixture
def served() -> Iterator[CoordinatorServer]:
    one = CoordinatorServer(loopback=True)
    one.begin(1, coordinator(3))
    yield one
    one.close()
    assert not one._thread.is_alive()


def opened(at: CoordinatorServer, port: int) -> None:
    """Open the workers' store of round 1."""
    with at.locked(1) as own:
        assert own is not None
        own.open(port)


@pytest.mark.parametrize("size", [1, 7, 60])
def test_a_message_may_arrive_in_pieces(size: int, served: CoordinatorServer) -> None:
    with Launcher(served) as one:
        line = one.line()
        for start in range(0, len(line), size):
            one.socket.sendall(line[start : start + size])
            time.sleep(0.001)
        assert one.receive() == Answer()
        one.socket.sendall(line)
        assert one.receive() == Answer()


def test_messages_that_arrive_together_are_all_answered(served: CoordinatorServer) -> None:
    with Launcher(served) as one:
        half = len(one.line()) // 2
        one.socket.sendall(one.line() + one.line(generation=1) + one.line()[:half])
        assert [one.receive().generation for _ in range(2)] == [0, 1]
        one.socket.sendall(one.line()[half:])
        assert one.receive() == Answer()


@pytest.mark.parametrize(("more", "is_answered"), [(0, True), (1, False)])
def test_the_longest_message(more: int, is_answered: bool, served: CoordinatorServer) -> None:
    with Launcher(served) as one:
        fill = LINE - len(one.line(leaves="")) + 1 + more  # the newline does not count
        one.socket.sendall(one.line(leaves="x" * fill))
        if is_answered:
            decision = one.receive().decision
            assert decision is not None
            assert len(decision.text) == fill
        else:
            with contextlib.suppress(ConnectionResetError):
                assert one.socket.recv(1) == b""


def test_a_change_is_sent_to_all_without_another_report(served: CoordinatorServer) -> None:
    with Launcher(served, 1) as first, Launcher(served, 2) as second:
        for one in (first, second):
            one.socket.sendall(one.line())
            assert one.receive() == Answer()
        opened(served, 77)
        assert first.receive() == second.receive() == Answer(port=77)
        second.socket.sendall(second.line(leaves="stopped"))
        told = first.receive().decision
        assert told == second.receive().decision
        assert told is not None
        assert (told.kind, told.staying) == ("round", (0, 1))


def test_a_report_that_comes_before_the_round_counts_when_it_begins(
    served: CoordinatorServer,
) -> None:
    with Launcher(served) as one, Launcher(served, 99) as stray:
        for each in (one, stray):
            each.socket.sendall(each.line(round=2))
            assert each.receive() == Answer()
        own = coordinator(2)
        served.begin(2, own)
        served.receive(LauncherReport(index=0, round=2, generation=0))
        assert own.all_entered
        with served.locked(2):
            own.open(78)
        assert one.receive() == Answer(port=78)


def test_a_launcher_that_reads_late_gets_all_of_a_long_answer(served: CoordinatorServer) -> None:
    with Launcher(served, 1) as late, Launcher(served, 2) as other:
        for one in (late, other):
            one.socket.sendall(one.line())
            one.receive()
        text = "x" * (LINE - 1000)
        other.socket.sendall(other.line(leaves=text))
        assert other.receive().decision is not None
        for _ in range(20):  # more than the buffers of the connection hold
            late.socket.sendall(late.line())
        for _ in range(21):
            decision = late.receive().decision
            assert decision is not None
            assert decision.text == text


def test_one_that_leaves_and_one_that_dies_among_many() -> None:
    served = CoordinatorServer(loopback=True)
    served.begin(1, coordinator(301))
    launchers = []
    for index in range(1, 301):
        launchers.append(Launcher(served, index))
        launchers[-1].socket.sendall(launchers[-1].line())
        assert launchers[-1].receive() == Answer()
    launchers[216].close()
    launchers[99].socket.sendall(launchers[99].line(leaves="node 100 was stopped"))
    decisions = [one.receive().decision for k, one in enumerate(launchers) if k != 216]
    expected = Decision(
        kind="round",
        text="node 100 was stopped",
        staying=tuple(index for index in range(301) if index != 100),
    )
    assert decisions == [expected] * 299
    served.close()
    for one in launchers:
        one.close()
