"""From a rendezvous to its process group."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.errors import DeviceError, PeerError
from lockstep.world import World, connect
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from tests.unit.threads import Party

CPU = torch.device("cpu")


def each_rank(size: int) -> list[RankRendezvous]:
    store = dist.HashStore()
    place = {"size": size, "local_size": size, "address": "h", "port": 1}
    worlds = [World(rank=rank, local_rank=rank, **place) for rank in range(size)]  # type: ignore[arg-type]
    return [RankRendezvous(world=one, store=store, number=0, ours=True) for one in worlds]


def test_one_rank_needs_no_group() -> None:
    found = connect.connect(each_rank(1)[0], CPU)
    assert (found.group, found.owned) == (None, False)
    found.store.set("note", "1")


def test_a_group_of_the_scripts_own_is_taken(lone_group: Any) -> None:
    found = connect.connect(each_rank(1)[0], CPU)
    assert found.group is lone_group
    assert not found.owned


@pytest.mark.parametrize(
    ("made", "taken"), [("cuda:gloo", False), ("cpu:gloo", True), ("cpu:gloo,cuda:gloo", True)]
)
def test_a_group_is_taken_that_has_a_side_for_the_cpu(
    made: str, taken: bool, torch_state: None
) -> None:
    dist.init_process_group(made, store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = connect.connect(each_rank(1)[0], CPU).group
        assert (found is dist.group.WORLD) == taken
        numbers = torch.ones(3)
        dist.all_reduce(numbers, group=found)
        assert numbers.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_one_gpu_for_two_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "device_identity", lambda _: "GPU-1")
    one, two = each_rank(2)
    first = Party(lambda: connect.connect(one, CPU))
    deadline = time.monotonic() + 5
    while not one.store.check(["devices/GPU-1/first"]):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with (
        pytest.raises(DeviceError, match="ranks 0 and 1 are both on GPU GPU-1"),
        two.reporting_failure(),
    ):
        connect.connect(two, CPU)
    failure = first.end()
    assert isinstance(failure, PeerError), "nobody waits in a collective"
    assert "rank 1 failed: DeviceError: ranks 0 and 1" in failure.message


def test_a_rank_that_never_connects_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = each_rank(2)
    two.fail(RuntimeError("no room"))
    with pytest.raises(PeerError, match="rank 1 failed: RuntimeError: no room"):
        connect.connect(one, CPU)
    assert not dist.is_initialized()
