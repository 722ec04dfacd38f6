"""Shares of cores: disjoint, whole cores, neighbours, and inside a NUMA node."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.launch.devices.binding import shares
from lockstep.launch.devices.machine import Machine
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.spec import LaunchSpec
from tests.unit.launch.planning import membership_of, plan

#: Eight cores of one thread; two nodes of four cores with two threads each, numbered as Linux does.
PLAIN = (tuple((cpu,) for cpu in range(8)),)
SERVER = (((0, 8), (1, 9), (2, 10), (3, 11)), ((4, 12), (5, 13), (6, 14), (7, 15)))
#: What a container may be given: three cores of one node, one of the other.
CRUMBS = (((0, 8), (1, 9), (3, 11)), ((6,),))


@pytest.mark.parametrize(
    ("topology", "n", "expected"),
    [
        (PLAIN, 1, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (PLAIN, 3, [(0, 1), (2, 3, 4), (5, 6, 7)]),
        (SERVER, 1, [(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]),
        (SERVER, 2, [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        (SERVER, 4, [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]),
        (SERVER, 3, [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        (CRUMBS, 2, [(0, 1, 3, 8, 9, 11), (6,)]),
        (CRUMBS, 4, [(0, 8), (1, 9), (3, 11), (6,)]),
    ],
)
def test_shares(topology, n, expected):
    assert list(shares(topology, n)) == expected


@pytest.mark.parametrize("topology", [PLAIN, SERVER, CRUMBS, (*SERVER, ((16,), (17,)))])
def test_shares_are_disjoint_whole_cores_of_one_node(topology):
    cores = [core for node in topology for core in node]
    for n in range(1, len(cores) + 1):
        found = shares(topology, n)
        assert len(found) == n
        assert all(found)
        assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*cores))
        for share in found:
            assert all(set(core) <= set(share) or not set(core) & set(share) for core in cores)
            touched = [node for node in topology if any(set(core) & set(share) for core in node)]
            assert len(touched) == 1 or n < len(topology)


def test_more_ranks_than_cores_cannot_be_bound():
    with pytest.raises(UsageError, match="--bind cores with 9 ranks on 8 core"):
        shares(PLAIN, 9)


def workers_of(bind: str | None, environ: dict[str, str], n: int = 2, **generation: Any):
    spec = LaunchSpec(target="a.py", n=n, settings=FlagSettings(bind=bind))
    return plan(spec, Machine(cores=8, topology=SERVER), environ, **generation).workers


@pytest.mark.parametrize(
    ("bind", "environ", "expected"),
    [
        (None, {}, [None, None]),
        ("none", {"LOCKSTEP_BIND": "cores"}, [None, None]),
        ("cores", {}, ["0-3,8-11", "4-7,12-15"]),
        (None, {"LOCKSTEP_BIND": "cores"}, ["0-3,8-11", "4-7,12-15"]),
    ],
)
def test_workers_are_told_their_processors(bind, environ, expected):
    workers = workers_of(bind, environ)
    assert [worker.env.get("LOCKSTEP_PROCESSORS") for worker in workers] == expected
    # The threads of a run follow from the cores of the node, so workers are told these, too.
    assert [worker.env.get("LOCKSTEP_CORES") for worker in workers] == [
        expected[0] and "8",
        expected[0] and "8",
    ]


def test_launchers_of_one_node_take_different_cores():
    workers = workers_of("cores", {}, membership=membership_of((2, 2), (0, 0), 1))
    assert [worker.env["LOCKSTEP_PROCESSORS"] for worker in workers] == ["4-5,12-13", "6-7,14-15"]


def test_a_word_that_is_none_is_refused():
    with pytest.raises(UsageError, match="LOCKSTEP_BIND is 'tight'; expected one of none, cores"):
        workers_of(None, {"LOCKSTEP_BIND": "tight"})
