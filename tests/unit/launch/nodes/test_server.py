"""The coordinator's server on a host that is short of descriptors or threads for a moment."""

from __future__ import annotations

import socket
import threading

import pytest

from lockstep.launch.nodes import server
from lockstep.launch.nodes.server import CoordinatorServer
from tests.unit.world.rendezvous.test_port_discovery import Crowded


def test_too_many_open_files_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = Crowded(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    monkeypatch.setattr(server.network, "listen", lambda *_, **__: crowded)
    one = CoordinatorServer(loopback=True)
    assert one.address.answers()
    assert crowded.left == 0
    one.close()


def test_a_connection_without_a_thread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_UNKNOWN", 1)
    one = CoordinatorServer(loopback=True)
    start, refusals = threading.Thread.start, [RuntimeError("can't start new thread")]

    def refuse_once(thread: threading.Thread) -> None:
        if refusals:
            raise refusals.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    assert not one.address.answers()
    assert one.address.answers(), "its place is free for the next one"
    one.close()
