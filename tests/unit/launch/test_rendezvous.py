"""How agents meet: one alone, and several that have gathered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from lockstep.launch.fixed_rendezvous import FixedRendezvous
from lockstep.launch.membership import Membership
from lockstep.launch.rendezvous import Rendezvous
from tests.unit.threads import together


def go_on() -> None:
    pass


def gatherings(count: int) -> list[FixedRendezvous]:
    store = dist.HashStore()
    first = Membership(
        index=0,
        ranks=(2,) * count,
        nodes=(0,) * count,
        names=tuple(f"node {k}" for k in range(count)),
        address="127.0.0.1",
        interface=None,
    )
    return [FixedRendezvous(store, replace(first, index=k), go_on) for k in range(count)]


def test_alone() -> None:
    one = Rendezvous("id", 3)
    port = one.next_generation()
    assert (one.roster.address, one.roster.size, one.run_id) == ("127.0.0.1", 3, "id")
    assert isinstance(one.store, dist.TCPStore)
    assert one.store.port == port > 0


def test_every_generation_has_a_store_of_its_own() -> None:
    one = Rendezvous("id", 1)
    one.next_generation()
    one.store.set("note", "1")
    one.next_generation()
    assert not one.store.check(["note"])
    assert one.generation == 1


def test_ranks_that_meet_in_a_file_need_no_port() -> None:
    import psutil

    one = Rendezvous("id", 2, listens=False)
    before = len(psutil.Process().net_connections("tcp"))
    assert one.next_generation() == 0
    assert len(psutil.Process().net_connections("tcp")) == before


def test_a_store_on_this_host_is_for_this_host() -> None:
    import psutil

    one = Rendezvous("id", 1)
    port = one.next_generation()
    listening = [
        link.laddr.ip
        for link in psutil.Process().net_connections("tcp")
        if link.laddr.port == port and link.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]


def test_launchers_that_have_gathered_share_a_store() -> None:
    all_of_them = [Rendezvous("id", 2, one) for one in gatherings(3)]
    for generation in range(2):
        ports = together(*(one.next_generation for one in all_of_them))
        assert len(set(ports)) == 1
        assert not all_of_them[0].store.check(["note"])
        all_of_them[0].store.set("note", f"{generation}")
        assert all_of_them[2].store.get("note").decode() == f"{generation}"


def test_the_end() -> None:
    one = Rendezvous("id", 1)
    one.next_generation()
    one.finish()
    with pytest.raises(AssertionError):
        _ = one.store
