"""What a run directory says of the run in it, and how ranks ask each other where its newest state is."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.engine.recovery.resume import ResumeInfo, StateSearch, launch_of, recall
from lockstep.engine.training.divergence import check_same
from lockstep.settings import Settings
from lockstep.world.model import World
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
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


def each_rank(size: int) -> list[RankRendezvous]:
    store = dist.HashStore()
    place: dict[str, Any] = {"size": size, "local_size": size, "address": "h", "port": 1}
    worlds = [World(rank=rank, local_rank=rank, **place) for rank in range(size)]
    return [RankRendezvous(world=one, store=Counting(store), number=0, ours=True) for one in worlds]  # type: ignore[arg-type]


def keys_read(ranks: list[RankRendezvous]) -> list[int]:
    return [sum(one.store.read.values()) for one in ranks]  # type: ignore[attr-defined]


EMPTY: Any = SimpleNamespace(newest_text=lambda: None, newest=lambda: None)


@pytest.mark.parametrize("size", [2, 9])
def test_the_search_reads_as_many_keys_on_each_rank_however_many_there_are(size: int) -> None:
    ranks = each_rank(size)
    searches = [StateSearch(one, None, None, EMPTY) for one in ranks]
    assert together(*(one.find for one in searches)) == [None] * size
    main, *others = keys_read(ranks)
    assert others == [2] * (size - 1)
    assert main == 2 + 2 * size


@pytest.mark.parametrize("size", [2, 9])
def test_the_end_reads_one_key_on_each_rank(size: int) -> None:
    ranks = each_rank(size)
    ends = [partial(check_same, one, "lockstep1:a", dict, exact=True) for one in ranks]
    assert together(*ends) == [None] * size
    assert keys_read(ranks) == [1 + size, *[1] * (size - 1)]


@pytest.mark.parametrize("size", [2, 9])
def test_ranks_are_ready_when_the_main_rank_says_so(size: int) -> None:
    ranks = each_rank(size)
    assert together(*(one.ready for one in ranks)) == [None] * size
    main, *others = (one.store.widest for one in ranks)  # type: ignore[attr-defined]
    assert (main, others) == (size, [1] * (size - 1))


def rendezvous(generation: int = 0, environment: str = "lockstep") -> RankRendezvous:
    world = World(generation=generation, environment=environment)
    return RankRendezvous(world=world, store=dist.HashStore(), number=0, ours=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    recorded = {
        "identity": {"replicas": 4, "threads": 2},
        "launch": "one",
        "generations": [{}, {}],
        "status": "finished",
    }
    (tmp_path / "run.json").write_text(json.dumps(recorded))
    return tmp_path


def test_the_launch_that_has_made_it_goes_on_with_it_fresh_or_not(directory):
    mine = ResumeInfo(generations=2, replicas=4, threads=2, is_ours=True)
    assert recall(rendezvous(1), directory, "one", Settings(name="x")) == mine
    assert recall(rendezvous(1), directory, "one", Settings(name="x", fresh=True)) == mine


def test_a_restart_before_anything_was_recorded_does_not_go_on_with_an_older_run(directory):
    """Killed before it opened its run: what lies there is of another launch."""
    assert recall(rendezvous(1), directory, "two", Settings(name="x", fresh=True)) == ResumeInfo()
    assert not recall(rendezvous(1), directory, "two", Settings(name="x")).is_ours


def test_an_empty_directory_and_none(tmp_path):
    assert recall(rendezvous(), tmp_path, "one", Settings(name="x")).is_new
    assert recall(rendezvous(), None, "one", Settings(name="x")).is_new


def test_launchers_that_give_no_name(directory):
    world = World(environment="torchrun")
    assert launch_of(world, {"LOCKSTEP_LAUNCH": "none"}) is None
    assert launch_of(World(environment="lockstep"), {"LOCKSTEP_LAUNCH": "x"}) == "x"
    assert not recall(rendezvous(1, "torchrun"), directory, None, Settings(name="x")).is_ours
    recorded = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**recorded, "launch": None}))
    assert recall(rendezvous(1, "torchrun"), directory, None, Settings(name="x")).is_ours
    assert not recall(rendezvous(0, "torchrun"), directory, None, Settings(name="x")).is_ours
