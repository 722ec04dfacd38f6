"""Questions to members that are threads, at stores of every kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import UnreachableError, WorldError
from lockstep.world.rendezvous import members
from lockstep.world.rendezvous.members import Members
from tests.unit.threads import Party, together

#: Gives each member a client of one store.
Clients = Callable[[], dist.Store]


@pytest.fixture(params=["hash", "tcp", "file"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Clients:
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "rendezvous"), -1)
    store: dist.Store = dist.HashStore()
    if request.param == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.PrefixStore("members", store)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_SLACK", 0.2)
    monkeypatch.setattr(members, "_LINGER_SECONDS", 0.1)


def ask(
    clients: Clients,
    index: int,
    own: Any = 0,
    answer: Callable[[list[Any]], Any] = list,
    seconds: float = 5,
    **changes: Any,
) -> Any:
    labels = ["a", "b", "c"]
    one = Members(clients(), index, labels, kind=UnreachableError, hint="look", **changes)
    return one.ask("what", own, answer, seconds)


def test_all_get_the_answer_of_member_0(clients: Clients) -> None:
    asked = (partial(ask, clients, index, {"own": index}) for index in range(3))
    assert together(*asked) == [[{"own": 0}, {"own": 1}, {"own": 2}]] * 3


@pytest.mark.parametrize("late", [0, 1])
def test_one_that_comes_late_is_waited_for(clients: Clients, late: int) -> None:
    early = [Party(partial(ask, clients, index)) for index in range(3) if index != late]
    time.sleep(0.05)
    assert ask(clients, late) == [0, 0, 0]
    assert [one.end() for one in early] == [[0, 0, 0]] * 2


def test_those_that_are_missing_are_none(clients: Clients) -> None:
    asked = (partial(ask, clients, index, seconds=0.7) for index in (0, 2))
    assert together(*asked) == [[0, None, 0]] * 2


def refuse(_: list[Any]) -> Any:
    raise WorldError("they don't fit", hint="make them fit")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refuse, "they don't fit\nhint: make them fit"),
        (
            lambda told: told[0]["x"],
            "the value of a member cannot be read; expected one launch here\nhint: look",
        ),
        (
            lambda told: told[0].get("x"),
            "the value of a member cannot be read; expected one launch here\nhint: look",
        ),
        (
            lambda told: told[3],
            "the value of a member cannot be read; expected one launch here\nhint: look",
        ),
    ],
)
def test_an_error_is_told_to_all(clients: Clients, answer: Callable[..., Any], said: str) -> None:
    found = together(*(partial(ask, clients, index, answer=answer) for index in range(3)))
    assert [type(one) for one in found] == [UnreachableError] * 3
    assert {str(one) for one in found} == {said}


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_value_that_is_no_json(text: str) -> None:
    store = dist.HashStore()
    store.set("what/1", text)
    found = together(*(partial(ask, lambda: store, index) for index in (0, 2)))
    assert all("the value of b cannot be read" in str(one) for one in found), found


def test_the_first_answer_stays(clients: Clients) -> None:
    Members(clients(), 1, ["a", "b", "c"], hint="").refuse("what", WorldError("first"))
    assert "first" in str(Party(partial(ask, clients, 0)).end())


def test_member_0_is_missing(clients: Clients, impatient: None) -> None:
    with pytest.raises(UnreachableError, match=r"a did not answer within 0.3 s"):
        ask(clients, 1, seconds=0.1)


def test_the_store_goes_with_member_0() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    waiting = Party(partial(ask, lambda: client, 1))
    time.sleep(0.05)
    del host
    assert "a is gone, or the store is: " in str(waiting.end())


def test_the_check_ends_it(clients: Clients) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise InterruptedError

    waiting = [Party(partial(ask, clients, index, check=check)) for index in (0, 1)]
    stop.set()
    assert [type(one.end()) for one in waiting] == [InterruptedError] * 2


def test_member_0_leaves_last_and_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_LINGER_SECONDS", 0.3)
    store = dist.HashStore()
    for key in ("what/1", "what/2"):
        store.set(key, "0")
    began = time.monotonic()
    with pytest.raises(UnreachableError):
        ask(lambda: store, 0, answer=refuse)
    assert 0.3 <= time.monotonic() - began < 3
    store.add("what/heard", 2)
