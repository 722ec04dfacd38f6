"""Waiting at a store."""

from __future__ import annotations

import time

import torch.distributed as dist

from lockstep.world.waiting import await_any
from tests.unit.threads import Party


def test_the_more_important_group_is_named() -> None:
    store = dist.HashStore()
    for key in "abc":
        store.set(key, "1")
    assert await_any(store, [["x"], ["a", "b"], ["c"]], 0) == 1


def test_all_keys_of_a_group_are_waited_for() -> None:
    store = dist.HashStore()
    store.set("a", "1")
    waiting = Party(lambda: await_any(store, [["failed"], ["a", "b"]], 5))
    time.sleep(0.05)
    store.set("b", "1")
    assert waiting.end() == 1


def test_a_store_that_goes() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    waiting = Party(lambda: await_any(client, [["a"]], 5))
    time.sleep(0.05)
    del host
    assert isinstance(waiting.end(), RuntimeError)
