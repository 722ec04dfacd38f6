"""The launchers of several nodes gather: they find each other, call the roll and survey the network.

party ── store: behind a door, or a file in a shared directory ── roll call ── survey ── roster
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import WorldError
from lockstep.launch.meeting_file import MeetingFile
from lockstep.launch.nodes import Party
from lockstep.launch.roster import Roster
from lockstep.world import clocks, door, host, network, roll_call
from lockstep.world.door import Door
from lockstep.world.meet import LOOPBACK, connect_store, host_store
from lockstep.world.survey import Reach, survey

#: Raises when the launcher has been told to stop.
Check = Callable[[], None]


class Gathering:
    """All launchers of a launch, met.

    Args:
        store: a store that all of them reach.
        roster: who starts which ranks.
        file: the file of a shared directory in which they met, if they did.
    """

    def __init__(self, store: dist.Store, roster: Roster, file: MeetingFile | None = None) -> None:
        self._store = store
        self._file = file
        self.roster = roster

    def tell(self, key: str, value: str) -> None:
        """Tell all launchers something."""
        self._store.set(f"told/{key}", value)

    def hear(self, key: str) -> str:
        """Return what launcher 0 has told, or will tell.

        Raises:
            WorldError: if it leaves without.
        """
        try:
            return self._store.get(f"told/{key}").decode()
        except RuntimeError as error:
            raise WorldError(
                f"{self.roster.names[0]} left before the launch began",
                hint="look at the output of its launcher",
            ) from error

    def close(self) -> None:
        """Leave no file behind."""
        if self._file is not None:
            self._file.close(remove=self.roster.index == 0)


def gather(
    party: Party, ranks: int, *, seconds: float, interface: str | None, check: Check
) -> Gathering:
    """Find the other launchers of `party`.

    Args:
        party: how they find each other.
        ranks: number of ranks of this launcher.
        seconds: how long launchers may take to come.
        interface: network interface that the user chose.
        check: called again and again while others are waited for.

    Raises:
        UnreachableError: if nodes cannot reach each other; says which, and where.
        WorldError: if launchers don't come, or don't fit together.
    """
    if party.directory is None:
        index, store = _find(party, seconds, check)
        return Gathering(store, _call(party, index, store, ranks, seconds, interface))
    file = MeetingFile(party.directory, party.name)
    try:
        index, store = file.meet(party.count, seconds, check)
        roster = _call(party, index, store, ranks, seconds, interface)
    except BaseException:
        file.close(remove=False)
        raise
    return Gathering(store, roster, file)


def _find(party: Party, seconds: float, check: Check) -> tuple[int, dist.Store]:
    if party.index is not None:
        return party.index, _meet_at_host(party, seconds, check, hosts=party.index == 0)
    with _host_lock(party.name) as first_here:
        hosts = first_here and _is_here(party)
        store = _meet_at_host(party, seconds, check, hosts=hosts)
    # The host of the store is launcher 0; the others are numbered as they come.
    return (0 if hosts else store.add("arrivals", 1)), store


def _meet_at_host(party: Party, seconds: float, check: Check, *, hosts: bool) -> dist.Store:
    assert party.address is not None
    loopback = door.listens_locally(party.address)
    if not hosts:
        guest = f"node {party.index}" if party.index is not None else _anybody()
        answer = door.knock(
            network.addresses_of(party.address),
            party.name,
            guest,
            token=secrets.token_hex(8),
            seconds=seconds,
            port=party.port,
            check=check,
        )
        return connect_store(answer.address, answer.port)
    store = host_store(0, loopback=loopback)
    named = [f"node {index}" for index in range(1, party.count)]
    Door(
        name=party.name,
        store_port=store.port,
        guests=None if party.index is None else named,
        count=party.count - 1,
        loopback=loopback,
        port=party.port,
        hint=None if _is_here(party) else _elsewhere(party),
    ).serve(seconds, check)
    return store


def _elsewhere(party: Party) -> str:
    own = ", ".join(f"{one.name} {one.address}" for one in network.interfaces())
    return f"{party.address} is no address of {host.name()} ({own}): is this node 0?"


def _anybody() -> str:
    return f"a node on {host.name()}, process {os.getpid()}"


def _is_here(party: Party) -> bool:
    """Return whether the endpoint's host is this one."""
    assert party.address is not None
    own = {one.address for one in network.interfaces()} | {host.name()}
    found = {party.address, *network.addresses_of(party.address)}
    # Some systems let a host's own name mean an address of the loopback interface.
    return bool(own & found) or any(door.is_loopback(address) for address in found)


@contextlib.contextmanager
def _host_lock(name: str) -> Iterator[bool]:
    """Hold a lock among the launchers of this host that gather under `name`; give whether it was free."""
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            # An abstract address: it goes with its process, however that ends.
            lock.bind(f"\0lockstep/{os.getuid()}/{digest}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            is_free = False
        else:
            is_free = True
        yield is_free


def _call(
    party: Party,
    index: int,
    store: dist.Store,
    ranks: int,
    seconds: float,
    interface: str | None,
) -> Roster:
    """Call the roll of the launchers, and survey the network between their nodes."""
    card = roll_call.Card.of_launcher(party.count, os.getpid())
    store.set(f"launcher/{index}", f"{ranks} {host.name()}")
    roll_call.call(
        dist.PrefixStore("roll", store), index, card, timedelta(seconds=seconds), what="node"
    )
    cards = [roll_call.read(dist.PrefixStore("roll", store), other) for other in range(party.count)]
    told = [store.get(f"launcher/{other}").decode().split(" ", 1) for other in range(party.count)]
    names = tuple(f"node {number} ({name})" for number, (_, name) in enumerate(told))
    nodes = tuple(place.node_rank for place in roll_call.places(cards))
    address, own_interface = LOOPBACK, None
    reach: tuple[Reach, ...] = ()
    if len(set(nodes)) > 1:
        reach = survey(
            dist.PrefixStore("survey", store), index=index, labels=names, interface=interface
        )
        address, own_interface = reach[0].address, reach[index].interface
        clocks.compare(dist.PrefixStore("clocks", store), index, names)
    return Roster(
        index=index,
        ranks=tuple(int(count) for count, _ in told),
        nodes=nodes,
        names=names,
        address=address,
        interface=own_interface,
        reached_at=tuple(f"{one.interface} {one.address}" for one in reach),
        speaks=index == 0 or not party.shares_output,
    )
