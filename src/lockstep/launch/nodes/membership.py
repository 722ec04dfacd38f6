"""`Membership`: the launchers that take part in a launch, with their ranks and nodes."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.world.network import LOOPBACK

#: Maximum number of launchers that a message names.
_NAMES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Resources of one launcher: number of ranks, host name, CPUs, and names of GPUs."""

    ranks: int
    name: str
    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Constants of a launch, chosen by its first launcher.

    Attributes:
        token: secret with which workers and parameter servers of the launch identify themselves.
        stamp: name of the run's directory, unless the user chooses one.
        resumes: whether `stamp` names an unfinished run, which the launch resumes.
        replicas: default number of logical data-parallel workers of a run in an elastic launch.
    """

    run_id: str
    token: str = field(repr=False)
    stamp: str
    resumes: bool
    replicas: int

    @staticmethod
    def new(replicas: int, stamp: str | None = None) -> Common:
        """Return the constants of a new launch.

        `replicas` is the default number of logical data-parallel workers, and `stamp` the name of the
        directory of an unfinished run to resume.
        """
        run_id, now = uuid.uuid4().hex, time.strftime("%Y%m%d-%H%M%S")
        return Common(
            run_id=run_id,
            token=secrets.token_hex(16),
            stamp=stamp or f"{now}-{run_id[:4]}",
            resumes=stamp is not None,
            replicas=replicas,
        )


class LaunchEnded(Exception):  # noqa: N818 - an end, and no error
    """Raised if the launch ended while this launcher waited to join it; this is not an error."""


def owns(index: int, nodes: Sequence[int], things: Sequence[Sequence[object]]) -> bool:
    """Return whether launcher `index` has CPUs or GPUs that no other launcher on its node has.

    `nodes` has the node of each launcher, and `things` the CPUs or GPUs of each. The result is false if the
    launcher shares any of them, and also if it is the only launcher of its node. Schedulers may give each
    launcher of a node its own CPUs.
    """
    same = [k for k, node in enumerate(nodes) if node == nodes[index] and k != index]
    mine = set(things[index])
    return bool(same and mine) and not any(mine & set(things[other]) for other in same)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The launchers that take part in a launch, and the index of this launcher.

    Attributes:
        index: number of this launcher.
        nodes: node number of each launcher, in the order of first appearance.
        names: name of each launcher in messages.
        address: address of launcher 0 that all launchers can reach.
        interface: network interface of this launcher's workers; `None` if none was chosen.
        own_cores: whether this node has other launchers, and none shares CPUs with this one.
        own_gpus: whether this node has other launchers, and none shares GPUs with this one.
        overrules_interface: whether `interface` takes precedence over variables of Gloo and NCCL.
        reached_at: interface and address of each launcher, as the others reach it; empty on one node.
        speaks: whether this launcher prints messages that are the same on all launchers.
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
        """Return the membership of a single launcher with this number of ranks."""
        return Membership(
            index=0, ranks=(ranks,), nodes=(0,), names=("",), address=LOOPBACK, interface=None
        )

    @property
    def count(self) -> int:
        """Number of launchers."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Number of ranks of all launchers."""
        return sum(self.ranks)

    @property
    def first_rank(self) -> int:
        """Lowest rank that this launcher starts."""
        return sum(self.ranks[: self.index])

    @property
    def node(self) -> int:
        """Number of this launcher's node."""
        return self.nodes[self.index]

    @property
    def node_count(self) -> int:
        """Number of nodes; several launchers may share a node."""
        return len(set(self.nodes))

    @property
    def first_local_rank(self) -> int:
        """Local rank of this launcher's first rank on its node."""
        return self._on_node(self.ranks[: self.index])

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self._on_node(self.ranks)

    def _on_node(self, ranks: Sequence[int]) -> int:
        pairs = zip(ranks, self.nodes, strict=False)
        return sum(count for count, node in pairs if node == self.node)

    def __str__(self) -> str:
        """Return the launchers and their hosts as one line of text."""
        places = self.reached_at or ("",) * self.count
        each = [
            f"{name}{place and f' at {place}'}"
            for name, place in zip(self.names, places, strict=True)
        ]
        if self.count > _NAMES:
            each[_NAMES:] = [f"and {self.count - _NAMES} more"]
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        launchers = "1 launcher" if self.count == 1 else f"{self.count} launchers"
        return f"{ranks} by {launchers}: {', '.join(each)}"
