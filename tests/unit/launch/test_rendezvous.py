"""How agents meet: one alone, and several that have gathered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from lockstep.launch.gathering import Gathering
from lockstep.launch.rendezvous import Rendezvous
from lockstep.launch.roster import Roster
from tests.unit.threads import together


def go_on() -> None:
    pass


def gatherings(count: int) -> list[Gathering]:
    store = dist.HashStore()
    first = Roster(
        index=0,
        ranks=(2,) * count,
        nodes=(0,) * count,
        names=tuple(f"node {k}" for k in range(count)),
        address="127.0.0.1",
        interface=None,
    )
    return [Gathering(store, replace(first, index=k), go_on) for k in range(count)]


def test_alone() -> None:
    one = Rendezvous("id", 3)
    info = one.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert (info.bootstrap_store_info.master_addr, one.roster.size) == ("127.0.0.1", 3)
    assert info.bootstrap_store_info.master_port == one.store.port
    assert one.use_agent_store
    assert (one.get_run_id(), one.get_backend(), one.num_nodes_waiting()) == ("id", "lockstep", 0)


def test_every_generation_has_a_store_of_its_own() -> None:
    one = Rendezvous("id", 1)
    one.next_rendezvous().store.set("note", "1")
    one.store.set("note", "1")
    again = one.next_rendezvous()
    assert not again.store.check(["note"])
    assert not one.store.check(["note"])


def test_ranks_that_meet_in_a_file_need_no_port() -> None:
    import psutil

    one = Rendezvous("id", 2, listens=False)
    before = len(psutil.Process().net_connections("tcp"))
    assert one.next_rendezvous().bootstrap_store_info.master_port == 0
    assert len(psutil.Process().net_connections("tcp")) == before
    assert not one.use_agent_store


def test_a_store_on_this_host_is_for_this_host() -> None:
    import psutil

    one = Rendezvous("id", 1)
    port = one.next_rendezvous().bootstrap_store_info.master_port
    listening = [
        link.laddr.ip
        for link in psutil.Process().net_connections("tcp")
        if link.laddr.port == port and link.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]


def test_launchers_that_have_gathered_share_a_store() -> None:
    all_of_them = [Rendezvous("id", 2, one) for one in gatherings(3)]
    for generation in range(2):
        infos = together(*(one.next_rendezvous for one in all_of_them))
        assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
        assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
        assert not infos[0].store.check(["note"])
        infos[0].store.set("note", f"{generation}")
        assert infos[2].store.get("note").decode() == f"{generation}"


def test_the_end() -> None:
    one = Rendezvous("id", 1)
    one.next_rendezvous()
    assert not one.is_closed()
    one.set_closed()
    assert one.is_closed()
    again = Rendezvous("id", 1)
    assert again.shutdown()
    assert again.is_closed()
    with pytest.raises(AssertionError):
        _ = again.store
