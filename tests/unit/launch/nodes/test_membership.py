"""Who starts which ranks: the launchers part the world among them, and each node among its own."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.nodes.membership import Launcher, Membership, owns
from lockstep.world.rendezvous.decode import decode

launchers = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6)


def memberships(pairs: list[tuple[int, int]]) -> list[Membership]:
    ranks, hosts = zip(*pairs, strict=True)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [
        Membership(
            index=index,
            ranks=ranks,
            nodes=tuple(numbers[host] for host in hosts),
            names=tuple(f"node {k}" for k in range(len(ranks))),
            address="10.0.0.1",
            interface=None,
        )
        for index in range(len(ranks))
    ]


@given(launchers)
def test_ranks_part_the_world_in_the_order_of_launchers(pairs: list[tuple[int, int]]) -> None:
    all_ranks: list[int] = []
    for one in memberships(pairs):
        all_ranks += range(one.first_rank, one.first_rank + one.ranks[one.index])
    assert all_ranks == list(range(memberships(pairs)[0].size))


@given(launchers)
def test_local_ranks_part_each_node(pairs: list[tuple[int, int]]) -> None:
    by_node: dict[int, list[int]] = {}
    for one in memberships(pairs):
        here = range(
            one.first_local_rank,
            one.first_local_rank + one.ranks[one.index],
        )
        by_node.setdefault(one.node, []).extend(here)
        assert max(here) < one.local_size
        assert one.node_count == len(set(one.nodes))
    for one in memberships(pairs):
        assert sorted(by_node[one.node]) == list(range(one.local_size))


def test_a_launcher_owns_what_no_neighbour_has() -> None:
    nodes = (0, 0, 1)
    assert owns(0, nodes, [(0, 1), (2, 3), (0, 1)])
    assert not owns(0, nodes, [(0, 1), (1, 2), (5,)])
    assert not owns(0, nodes, [(), (1, 2), (5,)]), "what nobody knows is nobody's own"
    assert not owns(2, nodes, [(0,), (1,), (2,)]), "alone on its node, it shares with nobody"


def test_what_launchers_tell_each_other_survives_json() -> None:
    told = Launcher(ranks=2, name="hosta", cpus=(0, 1), gpus=("GPU-1",))
    assert decode(Launcher, json.loads(json.dumps(asdict(told)))) == told


def test_in_words() -> None:
    one, two = memberships([(2, 0), (1, 1)])
    assert str(one) == str(two) == "3 ranks by 2 launchers: node 0, node 1"


@pytest.mark.parametrize(("count", "end"), [(64, "node 63"), (65, "node 63, and 1 more")])
def test_of_many_launchers_some_are_named(count: int, end: str) -> None:
    (one, *_) = memberships([(1, k) for k in range(count)])
    assert str(one).endswith(f" by {count} launchers: " + ", ".join(one.names[:63]) + f", {end}")
