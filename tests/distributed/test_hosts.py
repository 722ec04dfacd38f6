"""Ranks that take each other for ranks of several hosts train to the digest of one process (A4, B1)."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lockstep.testing import run_ranks
from tests.distributed import jobs

pytestmark = pytest.mark.ranks(4)


def pretend(hosts: list[int], refused: int | None) -> list[int]:
    """Let this rank be on one of several hosts, one of which may refuse shared memory; list their ranks."""
    from lockstep.engine.exchange import hosts as module

    rank, found = int(os.environ["RANK"]), []
    find = module._host_number

    def number() -> int:
        own = [host for host, count in enumerate(hosts) for _ in range(count)][rank]
        return 0 if own == refused else find() + own

    def find_hosts(group: Any) -> list[range]:
        found.extend(ranges := inner(group))
        return ranges

    inner = module.find_hosts
    module._host_number, module.find_hosts = number, find_hosts
    return found


def train_conv(hosts: list[int], refused: int | None, settings: dict[str, Any]) -> Any:
    """Train in buckets of a few parameters; return the digest and the number of ranks of each host."""
    found = pretend(hosts, refused)
    digest = jobs.train_conv({"exchange": "tree", **settings}, {"bucket_cap_mb": 0.001})
    return digest, [len(ranks) for ranks in found]


def train_halving(hosts: list[int], settings: dict[str, Any]) -> Any:
    """Train with recursive halving between hosts, however few they are; return what `train_conv` does."""
    from lockstep.engine.layout import halving

    halving.FEWEST = 2
    return train_conv(hosts, None, settings)


def train_gan(hosts: list[int]) -> str:
    """Train two models."""
    pretend(hosts, None)
    return jobs.train_gan()


@pytest.mark.wide(beyond=3)
@pytest.mark.parametrize(
    ("hosts", "replicas"),
    [
        *(([2, 2], 4), ([3, 1], 5), ([1, 2, 1], 7)),
        *(([2, 2], 6), ([1, 3], 4), ([1, 1, 2], 5), ([2, 1], 3), ([1, 2], 8), ([1, 1, 1, 1], 6)),
    ],
    ids=str,
)
def test_one_digest_on_every_layout_of_hosts(hosts: list[int], replicas: int) -> None:
    (expected,) = run_ranks(jobs.train_conv, 1, {"replicas": replicas}, {})
    found = run_ranks(train_conv, sum(hosts), hosts, None, {"replicas": replicas})
    assert found == [(expected, hosts)] * sum(hosts)


@pytest.mark.parametrize(
    ("hosts", "replicas"), [([2, 2], 4), ([1, 1, 1, 1], 4), ([1, 1, 1, 1], 8)], ids=str
)
def test_one_digest_with_recursive_halving(hosts: list[int], replicas: int) -> None:
    (expected,) = run_ranks(jobs.train_conv, 1, {"replicas": replicas}, {})
    found = run_ranks(train_halving, sum(hosts), hosts, {"replicas": replicas})
    assert found == [(expected, hosts)] * sum(hosts)


def test_a_host_that_refuses_shared_memory() -> None:
    (expected,) = run_ranks(jobs.train_conv, 1, {"replicas": 4}, {})
    found = run_ranks(train_conv, 4, [2, 2], 1, {"replicas": 4})
    assert found == [(expected, [1, 1, 1, 1])] * 4


def test_two_models() -> None:
    environ = {"LOCKSTEP_REPLICAS": "4", "LOCKSTEP_EXCHANGE": "tree"}
    (expected,) = run_ranks(jobs.train_gan, 1, environ=environ)
    assert set(run_ranks(train_gan, 4, [2, 2], environ=environ)) == {expected}
