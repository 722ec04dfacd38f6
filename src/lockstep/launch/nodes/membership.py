"""Membership: the ranks that each launcher starts. Pure, and the same on all launchers."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.world.network import LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Resources of a launcher: its number of ranks, host name, processors, and names of GPUs."""

    ranks: int
    name: str
    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Constants of a launch, made by its first launcher.

    Attributes:
        token: secret of the workers and servers of the launch.
        stamp: name of the run's directory, where the user names none.
        resumes: whether that is an unfinished run, which the launch continues.
        replicas: replicas of a run that names no number, where nodes come and go.
    """

    run_id: str
    token: str = field(repr=False)
    stamp: str
    resumes: bool
    replicas: int

    @staticmethod
    def new(replicas: int, stamp: str | None = None) -> Common:
        """Return those of a new launch, which continues the run in directory `stamp`, or begins one."""
        run_id, now = uuid.uuid4().hex, time.strftime("%Y%m%d-%H%M%S")
        return Common(
            run_id=run_id,
            token=secrets.token_hex(16),
            stamp=stamp or f"{now}-{run_id[:4]}",
            resumes=stamp is not None,
            replicas=replicas,
        )


class NotNeeded(Exception):  # noqa: N818 - an end, and no error
    """The launch has ended while this launcher waited to join it."""


def owns(index: int, nodes: Sequence[int], things: Sequence[Sequence[object]]) -> bool:
    """Return whether no other launcher on its node has any of its `things`; false where it is alone there.

    A scheduler that starts several launchers on a node may give each its own processors and GPUs.
    """
    same = [k for k, node in enumerate(nodes) if node == nodes[index] and k != index]
    mine = set(things[index])
    return bool(same and mine) and not any(mine & set(things[other]) for other in same)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The launchers of a round, and which of them this one is.

    Attributes:
        index: of this launcher.
        ranks: number of ranks of each launcher.
        nodes: node of each launcher, numbered as they first appear.
        names: of the launchers in messages.
        address: at which all of them reach launcher 0.
        interface: network interface of this launcher's workers; `None` leaves it to the plan.
        own_cores: whether no other launcher on its node has processors of this one.
        own_gpus: the same of its GPUs.
        overrules_interface: whether the user chose it for Lockstep, over variables of Gloo and NCCL.
        reached_at: interface and address at which all others reach each launcher; empty on one node.
        speaks: whether this launcher prints the verdict that all of them share.
    """

    index: int
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    names: tuple[str, ...]
    address: str
    interface: str | None
    own_cores: bool = False
    own_gpus: bool = False
    overrules_interface: bool = False
    reached_at: tuple[str, ...] = ()
    speaks: bool = True

    @staticmethod
    def alone(ranks: int) -> Membership:
        """Return the membership of the only launcher."""
        return Membership(
            index=0, ranks=(ranks,), nodes=(0,), names=("",), address=LOOPBACK, interface=None
        )

    @property
    def count(self) -> int:
        """Number of launchers."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Number of ranks in all."""
        return sum(self.ranks)

    @property
    def first_rank(self) -> int:
        """The first rank that this launcher starts."""
        return sum(self.ranks[: self.index])

    @property
    def node(self) -> int:
        """Number of this launcher's node."""
        return self.nodes[self.index]

    @property
    def node_count(self) -> int:
        """Number of nodes; several launchers may be on one."""
        return len(set(self.nodes))

    @property
    def first_local_rank(self) -> int:
        """Number of ranks of earlier launchers on this node."""
        return self._on_node(self.ranks[: self.index])

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self._on_node(self.ranks)

    def _on_node(self, ranks: Sequence[int]) -> int:
        pairs = zip(ranks, self.nodes, strict=False)
        return sum(count for count, node in pairs if node == self.node)

    def __str__(self) -> str:
        """Return the launchers and their hosts, in one line."""
        places = self.reached_at or ("",) * self.count
        each = [
            f"{name}{place and f' at {place}'}"
            for name, place in zip(self.names, places, strict=True)
        ]
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        launchers = "1 launcher" if self.count == 1 else f"{self.count} launchers"
        return f"{ranks} by {launchers}: {', '.join(each)}"
