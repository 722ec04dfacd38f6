"""The launchers of several nodes gather: they find each other, call the roll and survey the network.

party ── store: behind a door, or a file in a shared directory ── roll call ── survey ── roster
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from lockstep.errors import LockstepError, WorldError
from lockstep.launch.coordinator_server import Place
from lockstep.launch.membership import Launcher, Membership, owns
from lockstep.launch.nodes import RendezvousConfig
from lockstep.launch.rdzv_endpoint import elsewhere, host_lock, is_here, knock
from lockstep.launch.rendezvous_file import RendezvousFile
from lockstep.world import clocks, membership_check, network, port_discovery
from lockstep.world.connectivity_check import Reach, survey
from lockstep.world.meet import LOOPBACK, host_store
from lockstep.world.port_discovery import PortDiscovery
from lockstep.world.waiting import Check, await_any

#: How long launchers may take to make their directories and open their store.
_SECONDS = 60.0
#: How long a launcher that has nothing good to say waits for others to say it to.
_SECONDS_IN_VAIN = 20.0
_SEE_OFF_SECONDS = 2.0
#: How long a launcher of a round may keep the others waiting in the survey: else another round begins.
_ROUND_PATIENCE = 4.0


class FixedRendezvous:
    """All launchers of a launch, met.

    Args:
        store: a store that all of them reach.
        roster: who starts which ranks.
        check: called again and again while others are waited for.
        file: the file of a shared directory in which they met, if they did.
    """

    def __init__(
        self,
        store: dist.Store,
        roster: Membership,
        check: Check,
        file: RendezvousFile | None = None,
    ) -> None:
        self._store = store
        self._check = check
        self._file = file
        self.roster = roster

    @property
    def leads(self) -> bool:
        """Whether this launcher says what all are to know."""
        return self.roster.index == 0

    def tell(self, key: str, value: str) -> None:
        """Tell all launchers something."""
        self._store.set(f"told/{key}", value)

    def hear(self, key: str) -> str:
        """Return what launcher 0 has told, or will tell.

        Raises:
            WorldError: if a launcher cannot go on, or launcher 0 leaves without.
        """
        self._await([f"told/{key}"])
        return self._store.get(f"told/{key}").decode()

    def ready(self) -> None:
        """Wait until all launchers are ready to start their workers.

        Raises:
            WorldError: if one cannot go on.
        """
        self._store.set(f"ready/{self.roster.index}", "1")
        self._await([f"ready/{index}" for index in range(self.roster.count)])

    def fail(self, error: LockstepError) -> None:
        """Tell the others that this launcher cannot go on; launcher 0 leaves when they have heard."""
        if self._store.add("failures", 1) == 1:
            name = self.roster.names[self.roster.index]
            self._store.set("failed", f"{name} cannot start its ranks: {error.message}")
        if self.roster.index == 0:
            others = [f"heard/{index}" for index in range(1, self.roster.count)]
            await_any(self._store, [others], _SEE_OFF_SECONDS)

    def tell_place(self, place: Place) -> None:
        """Tell the others where launcher 0 listens."""
        self.tell("place", place.spell())

    def hear_place(self) -> Place:
        """Return where launcher 0 listens.

        Raises:
            WorldError: if it cannot go on, or has left.
        """
        return Place.parse(self.hear("place"))

    def _await(self, keys: Sequence[str]) -> None:
        try:
            found = await_any(self._store, [["failed"], keys], _SECONDS, self._check)
            problem = self._store.get("failed").decode() if found == 0 else None
            if problem is not None:
                self._store.set(f"heard/{self.roster.index}", "1")
        except RuntimeError as error:
            raise left(self.roster.names[0]) from error
        if found != 1:
            raise WorldError(
                problem or f"not all launchers were ready within {_SECONDS:g} s",
                hint="look at the output of its launcher",
            )

    def close(self) -> None:
        """Leave no file behind."""
        if self._file is not None:
            self._file.close()


def gather(
    party: RendezvousConfig, own: Launcher, *, seconds: float, interface: str | None, check: Check
) -> FixedRendezvous:
    """Find the other launchers of `party`.

    Args:
        party: how they find each other.
        own: what the others are to know of this launcher.
        seconds: how long launchers may take to come.
        interface: network interface that the user chose.
        check: called again and again while others are waited for.

    Raises:
        UnreachableError: if nodes cannot reach each other; says which, and where.
        WorldError: if launchers don't come, or don't fit together.
    """
    file = None if party.directory is None else RendezvousFile(party.directory, party.name)
    if interface is not None and not _exists(interface):
        seconds = min(seconds, _SECONDS_IN_VAIN)  # only to let the others know; the survey names it
    try:
        if file is None:
            index, store = _find(party, seconds, check)
        else:
            index, store = file.meet(party.count, seconds, check)
        roster = _call(party, index, store, own, seconds, interface, check)
    except RuntimeError as error:
        _close(file)
        raise left("launcher 0") from error
    except BaseException:
        _close(file)
        raise
    return FixedRendezvous(store, roster, check, file)


def _close(file: RendezvousFile | None) -> None:
    if file is not None:
        file.close()


def left(name: str) -> WorldError:
    """Return the error of a launcher that was left alone before the launch began."""
    return WorldError(
        f"{name} left before the launch began", hint="look at the output of its launcher"
    )


def _exists(interface: str) -> bool:
    return any(one.name == interface for one in network.interfaces())


def _find(party: RendezvousConfig, seconds: float, check: Check) -> tuple[int, dist.Store]:
    if party.index is not None:
        return party.index, _meet_at_host(party, seconds, check, hosts=party.index == 0)
    with host_lock(party.name) as first_here:
        hosts = first_here and is_here(party)
        store = _meet_at_host(party, seconds, check, hosts=hosts)
    # The host of the store is launcher 0; the others are numbered as they come.
    return (0 if hosts else store.add("arrivals", 1)), store


def _meet_at_host(
    party: RendezvousConfig, seconds: float, check: Check, *, hosts: bool
) -> dist.Store:
    assert party.address is not None
    loopback = port_discovery.listens_locally(party.address)
    if not hosts:
        return knock(party, seconds, check)
    store = host_store(0, loopback=loopback)
    hint = None if loopback else elsewhere(party)
    named = [f"node {index}" for index in range(1, party.count)]
    entrance = PortDiscovery(
        name=party.name,
        store_port=store.port,
        guests=None if party.index is None else named,
        count=party.count - 1,
        loopback=loopback,
        port=party.port,
        hint=hint,
    )
    try:
        entrance.serve(seconds, check)
    except WorldError as error:
        membership_check.cancel(dist.PrefixStore("roll", store), error, len(entrance.came))
        raise
    return store


def _call(
    party: RendezvousConfig,
    index: int,
    store: dist.Store,
    own: Launcher,
    seconds: float,
    interface: str | None,
    check: Check,
) -> Membership:
    """Call the roll of the launchers, and survey the network between their nodes."""
    card = membership_check.Card.of_launcher(party.count, os.getpid())
    store.set(f"launcher/{index}", json.dumps(asdict(own)))
    roll = dist.PrefixStore("roll", store)
    membership_check.call(roll, index, card, timedelta(seconds=seconds), what="node", check=check)
    cards = [membership_check.read(roll, other) for other in range(party.count)]
    told = [Launcher.parse(store.get(f"launcher/{other}")) for other in range(party.count)]
    nodes = tuple(place.node_rank for place in membership_check.places(cards))
    return survey_roster(party, index, nodes, told, store, interface, check)


def survey_roster(
    party: RendezvousConfig,
    index: int,
    nodes: Sequence[int],
    told: Sequence[Launcher],
    store: dist.Store,
    interface: str | None,
    check: Check,
) -> Membership:
    """Survey the network between launchers who have met; return who they are, and how they are reached.

    Args:
        party: how they found each other.
        index: number of this launcher.
        nodes: the node that each is on.
        told: what each says of itself.
        store: a store that all of them reach, with nothing of another survey in it.
        interface: network interface that the user chose.
        check: called again and again while others are waited for.

    Raises:
        UnreachableError: if nodes cannot reach each other, or one has left.
    """
    names = tuple(f"node {number} ({one.name})" for number, one in enumerate(told))
    address, own_interface = LOOPBACK, None
    reach: tuple[Reach, ...] = ()
    if len(set(nodes)) > 1:
        reach = survey(
            dist.PrefixStore("survey", store),
            index=index,
            labels=names,
            interface=interface,
            patience=None if party.least is None else _ROUND_PATIENCE,
            check=check,
        )
        address, own_interface = reach[0].address, reach[index].interface
        clocks.compare(dist.PrefixStore("clocks", store), index, names, check)
    return Membership(
        index=index,
        ranks=tuple(one.ranks for one in told),
        nodes=tuple(nodes),
        names=names,
        address=address,
        interface=own_interface,
        own_cores=owns(index, nodes, [one.cpus for one in told]),
        own_gpus=owns(index, nodes, [one.gpus for one in told]),
        overrules_interface=interface is not None,
        reached_at=tuple(f"{one.interface} {one.address}" for one in reach),
        speaks=index == 0 or not party.shares_output,
    )
