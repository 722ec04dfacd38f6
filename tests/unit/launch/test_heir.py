"""A server's heir: raised when a worker tells of modules, dropped when it is unfit or gone."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from lockstep.launch import warm
from lockstep.launch.heir import Succession

SECONDS = 10.0


def succeed(data: bytes, descriptors: list[int]) -> NoReturn:
    """Be an heir that takes over: it says so, and ends."""
    os.write(descriptors[0], data)
    os._exit(0)


class Served(Succession):
    """A succession whose server attends to it when a test says so."""

    def tell(self, *modules: warm.Module) -> None:
        """Be a worker that has imported something."""
        self._tells.send(warm.message(modules))
        self.turn()

    def turn(self) -> None:
        """Wait for news and take them."""
        ready, _, _ = select.select(self.channels, [], [], SECONDS)
        assert ready, "no news"
        self.attend(set(ready), succeed)

    @property
    def pid(self) -> int | None:
        """Process id of the heir."""
        return None if self._heir is None else self._heir.pid


@pytest.fixture
def succession():
    """A succession that is closed at the end."""
    one = Served()
    yield one
    one.close()
    for channel in (one._hears, one._tells):
        channel.close()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what makes a module of a name and a source, and describes it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, source: str) -> warm.Module:
        (tmp_path / f"{name}.py").write_text(source)
        return name, str(tmp_path / f"{name}.py")

    return make


def test_heir_takes_the_first_message(succession, modules):
    reader, writer = os.pipe()
    assert succession.hand_over(b"too early", [writer]) is None
    succession.tell(modules("heir_clean", ""))
    assert succession.hand_over(b"not ready", [writer]) is None
    succession.turn()
    pid = succession.hand_over(b"start", [writer])
    assert pid == succession.pid
    os.close(writer)  # an heir that has died leaves the end of the file, not a wait
    assert os.read(reader, 10) == b"start"
    assert "heir_clean" not in sys.modules
    os.close(reader)


def test_unfit_heir_is_followed_by_one_without_the_package(succession, modules):
    bad = modules("heir_bad", "import socket; kept = socket.socket()")
    succession.tell(modules("heir_good", ""), bad)
    first = succession.pid
    succession.turn()
    assert succession.pid not in (None, first)
    succession.turn()
    assert succession.hand_over(b"start", [2]) == succession.pid


@pytest.mark.parametrize("ready", [True, False])
def test_heir_that_dies_has_no_follower(succession, modules, ready):
    succession.tell(modules("heir_slow", "" if ready else "import time; time.sleep(100)"))
    if ready:
        succession.turn()
    os.kill(succession.pid, signal.SIGKILL)
    succession.turn()
    assert succession.pid is None
    succession.tell(modules("heir_later", ""))
    assert succession.pid is None
