"""Whether ranks fit together: by what they say alone, and with ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import WorldError
from lockstep.world import World
from lockstep.world.rendezvous import members
from lockstep.world.rendezvous.membership_check import (
    NodeInfo,
    RankInfo,
    RankPlacement,
    came_once,
    check_members,
    places,
    problems,
)
from tests.unit.threads import Party, together

VERSIONS = {"lockstep": "0.1", "torch": "2.13.0"}


def place(
    local_rank: int, local_size: int, node_rank: int = 0, node_count: int = 1
) -> RankPlacement:
    return RankPlacement(
        local_rank=local_rank, local_size=local_size, node_rank=node_rank, node_count=node_count
    )


def info(
    host: str = "a", size: int = 2, where: RankPlacement | None = None, **node: Any
) -> RankInfo:
    plain = NodeInfo(host=host, name=host, pid=1, versions=VERSIONS)
    return RankInfo(node=replace(plain, **node), world=size, place=where)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_places_part_every_host(hosts: list[str]) -> None:
    found = places([info(host, len(hosts)) for host in hosts])
    for host in set(hosts):
        here = [one for one, other in zip(found, hosts, strict=True) if other == host]
        assert [one.local_rank for one in here] == list(range(len(here)))
        assert {one.local_size for one in here} == {len(here)}
        assert len({one.node_rank for one in here}) == 1
    firsts = list(dict.fromkeys(one.node_rank for one in found))
    assert firsts == list(range(len(set(hosts))))
    assert {one.node_count for one in found} == {len(firsts)}


@pytest.mark.parametrize(
    ("infos", "said"),
    [
        ([info(), info()], None),
        ([info("a", where=place(0, 1, n, 2)) for n in (0, 1)], None),  # a cluster that is simulated
        (
            [info(), info("b", versions={**VERSIONS, "torch": "2.11.0"})],
            "rank 1 on b has torch 2.11.0, rank 0 on a has 2.13.0; expected the same on all nodes",
        ),
        (
            [info(), info("b", versions={"lockstep": "0.1"})],
            "rank 1 on b has torch None, rank 0 on a",
        ),
        (
            [info(), info("b", 4)],
            "rank 1 on b is in a world of 4, rank 0 on a in a world of 2; expected the same",
        ),
        ([info(where=place(0, 2))] * 2, "ranks 0 and 1 are both local rank 0 of node 0 (a, a)"),
        (
            [info("a", where=place(0, 2)), info("b", where=place(1, 2))],
            "ranks 0 (a) and 1 (b) are both on node 0, but on different hosts",
        ),
        (
            [info(where=place(0, 2)), info("b")],
            "rank 1 on b does not know its local rank, though others do",
        ),
        (
            [info(where=place(0, 1)), info("b", where=place(1, 2, 1, 2))],
            "rank 1 on b is one of 2 on node 1, and 1 have come from there",
        ),
    ],
)
def test_what_does_not_fit(infos: list[RankInfo], said: str | None) -> None:
    found = next(iter(problems(infos)), None)
    assert (found is None) == (said is None)
    assert found is None or str(said) in found[0]


def test_what_a_rank_says_of_itself() -> None:
    world = World(rank=1, size=2, local_rank=1, local_size=2, address="h", port=1)
    one = RankInfo.of(world, 7)
    assert (one.node.pid, one.world, one.place) == (7, 2, place(1, 2))
    assert set(one.node.versions) == {"lockstep", "python", "torch", "numpy"}
    unplaced = RankInfo.of(replace(world, placed=False), 7)
    assert unplaced.place is None
    assert [RankInfo.parse(asdict(each)) for each in (one, unplaced)] == [one, unplaced]
    other = {"node": {"name": "b", "versions": {"lockstep": "9"}, "new": 1}}
    assert "has lockstep 9" in next(problems([one, RankInfo.parse(other)]))[0]


# Ranks that are threads.

Clients = Callable[[], dist.Store]


@pytest.fixture
def clients(tmp_path: Path) -> Clients:
    return lambda: dist.FileStore(str(tmp_path / "rendezvous"), -1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_SLACK", 0.2)
    monkeypatch.setattr(members, "_LINGER_SECONDS", 0.2)


def check(clients: Clients, rank: int, one: RankInfo, seconds: float = 5) -> Any:
    world = World(rank=rank, size=one.world, placed=False, file="(none)")
    return check_members(clients(), world, one, seconds)


def check_all(clients: Clients, infos: dict[int, RankInfo], seconds: float = 5) -> list[Any]:
    return together(*(partial(check, clients, rank, one, seconds) for rank, one in infos.items()))


def test_ranks_learn_their_places_and_the_names_of_nodes(clients: Clients) -> None:
    found = check_all(clients, {rank: info(host, 3) for rank, host in enumerate("bab")})
    assert [names for _, names in found] == [["b", "a"]] * 3
    numbers = [(w.local_rank, w.local_size, w.node_rank, w.node_count) for w, _ in found]
    assert numbers == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)]
    assert all(world.placed for world, _ in found)


def test_a_rank_beyond_the_world_of_rank_0(clients: Clients) -> None:
    found = check_all(clients, {0: info(), 1: info(), 3: info("b", 4)})
    assert isinstance(found[2], WorldError)
    assert "rank 3 on b is in a world of 4, rank 0 in a world of 2" in found[2].message


@pytest.mark.parametrize(
    ("size", "here", "said"),
    [
        (3, (0, 2), "1 of 3 ranks did not come within 0.1 s: rank 1"),
        (20, (0,), "19 of 20 ranks did not come within 0.1 s: rank 1, 2, 3, 4, 5, 6, 7, 8 …"),
        (2, (1,), "rank 0 did not answer within 0.3 s"),
    ],
)
def test_who_is_missing(
    size: int, here: tuple[int, ...], said: str, clients: Clients, impatient: None
) -> None:
    found = check_all(clients, {rank: info(size=size) for rank in here}, 0.1)
    assert {one.message for one in found} == {said}
    assert found[0].hint


def test_a_stale_file(clients: Clients, impatient: None) -> None:
    first = {rank: info(pid=100 + rank) for rank in (0, 1)}
    assert all(world.placed for world, _ in check_all(clients, first))
    assert came_once(clients(), 0)
    again = check_all(clients, {rank: info(pid=200 + rank) for rank in (0, 1)})
    for rank, failure in enumerate(again):
        assert failure.message == (
            f"rank {rank} has come twice: on a, process {200 + rank}, "
            f"and on a, process {100 + rank}"
        )
        assert "stale file" in failure.hint
    assert not came_once(clients(), 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_twice_while_another_is_awaited(
    rank: int, clients: Clients, impatient: None
) -> None:
    first = [Party(partial(check, clients, k, info(size=3, pid=k))) for k in (0, 1)]
    while not clients().check(["members/0", "members/1"]):
        pass
    told = [*check_all(clients, {rank: info(size=3, pid=9)}), *(one.end() for one in first)]
    said = f"rank {rank} has come twice: on a, process 9, and on a, process {rank}"
    assert {one.message for one in told} == {said}


def test_a_rank_that_died_between_its_claim_and_its_word(clients: Clients) -> None:
    clients().add("claim/0", 1)
    with pytest.raises(WorldError, match=r"rank 0 has come twice: on a, process 1\nhint: a stale"):
        check(clients, 0, info())
