"""Where a run's newest state is: how ranks ask each other, without other processes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.training.divergence import check_same
from lockstep.training.resume import Search
from lockstep.world.meet import Meeting
from lockstep.world.model import World
from tests.unit.threads import together


class Counting:
    """A rank's client of a store: counts the keys that it reads, and those of its widest question."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.read: Counter[str] = Counter()
        self.widest = 0

    def get(self, key: str) -> bytes:
        self.read[key] += 1
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        self.widest = max(self.widest, len(keys))
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def meetings(size: int) -> list[Meeting]:
    store = dist.HashStore()
    place: dict[str, Any] = {"size": size, "local_size": size, "address": "h", "port": 1}
    worlds = [World(rank=rank, local_rank=rank, **place) for rank in range(size)]
    return [Meeting(world=one, store=Counting(store), number=0, ours=True) for one in worlds]  # type: ignore[arg-type]


def keys_read(ranks: list[Meeting]) -> list[int]:
    return [sum(one.store.read.values()) for one in ranks]  # type: ignore[attr-defined]


EMPTY: Any = SimpleNamespace(newest_text=lambda: None, newest=lambda: None)


@pytest.mark.parametrize("size", [2, 9])
def test_the_search_reads_as_many_keys_on_each_rank_however_many_there_are(size: int) -> None:
    ranks = meetings(size)
    searches = [Search(one, None, None, EMPTY) for one in ranks]
    assert together(*(one.find for one in searches)) == [None] * size
    main, *others = keys_read(ranks)
    assert others == [2] * (size - 1)
    assert main == 2 + 2 * size


@pytest.mark.parametrize("size", [2, 9])
def test_the_end_reads_one_key_on_each_rank(size: int) -> None:
    ranks = meetings(size)
    ends = [partial(check_same, one, "lockstep1:a", dict, exact=True) for one in ranks]
    assert together(*ends) == [None] * size
    assert keys_read(ranks) == [1 + size, *[1] * (size - 1)]


@pytest.mark.parametrize("size", [2, 9])
def test_ranks_are_ready_when_the_main_rank_says_so(size: int) -> None:
    ranks = meetings(size)
    assert together(*(one.ready for one in ranks)) == [None] * size
    main, *others = (one.store.widest for one in ranks)  # type: ignore[attr-defined]
    assert (main, others) == (size, [1] * (size - 1))
