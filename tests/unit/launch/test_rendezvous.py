"""How agents meet: one alone, each generation with a store of its own."""

from __future__ import annotations

from lockstep.launch.agent.restarts import GenerationRendezvous
from lockstep.launch.plan import Generation
from lockstep.world.rendezvous.store import connect_store


def test_alone() -> None:
    one = GenerationRendezvous(Generation(run_id="id"), 3)
    first = one.next_generation()
    assert first.membership is not None
    assert (first.membership.address, first.membership.size) == ("127.0.0.1", 3)
    assert (first.run_id, first.number) == ("id", 0)
    connect_store("127.0.0.1", first.port).set("note", "1")


def test_ranks_that_are_left_out_are_those_of_the_first_generation() -> None:
    one = GenerationRendezvous(Generation(listens=False), 4)
    for rank, left_out in ((1, (1,)), (1, (1, 2)), (1, (1, 2, 3))):
        one.leave_out(rank)
        generation = one.next_generation()
        assert generation.left_out == left_out
        assert generation.membership is not None
        assert generation.membership.size == 4 - len(left_out)


def test_every_generation_has_a_store_of_its_own() -> None:
    one = GenerationRendezvous(Generation(run_id="id"), 1)
    connect_store("127.0.0.1", one.next_generation().port).set("note", "1")
    second = one.next_generation()
    assert not connect_store("127.0.0.1", second.port).check(["note"])
    assert second.number == 1


def test_ranks_that_meet_in_a_file_need_no_port() -> None:
    import psutil

    one = GenerationRendezvous(Generation(listens=False), 2)
    before = len(psutil.Process().net_connections("tcp"))
    assert one.next_generation().port == 0
    assert len(psutil.Process().net_connections("tcp")) == before


def test_a_store_on_this_host_is_for_this_host() -> None:
    import psutil

    one = GenerationRendezvous(Generation(run_id="id"), 1)
    port = one.next_generation().port
    listening = [
        link.laddr.ip
        for link in psutil.Process().net_connections("tcp")
        if link.laddr.port == port and link.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]


def test_the_end() -> None:
    import psutil

    one = GenerationRendezvous(Generation(run_id="id"), 1)
    port = one.next_generation().port
    one.finish()
    ports = {link.laddr.port for link in psutil.Process().net_connections("tcp")}
    assert port not in ports
