"""Join the nodes to be examined, and all-gather values between them.

The nodes join as the launchers of `lockstep run` do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.errors import WorldError
from lockstep.launch.agent.child import Child, LostError
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.launch.nodes.endpoint import Endpoint, enter, missing_hint
from lockstep.launch.nodes.join import Join
from lockstep.launch.nodes.keys import JoinEntry, RendezvousKeys
from lockstep.launch.nodes.membership import Common, Launcher
from lockstep.launch.nodes.server import ServerAddress
from lockstep.world import host
from lockstep.world.network import Interface, interfaces
from lockstep.world.rendezvous.members import Members
from lockstep.world.rendezvous.membership_check import NodeInfo
from lockstep.world.waiting import await_any, go_on

if TYPE_CHECKING:
    import torch.distributed as dist

#: Seconds that the other nodes wait for a node's facts.
PATIENCE = 12.0
_LEAVING_SECONDS = 3.0


@dataclass(slots=True, kw_only=True)
class NodeGroup:
    """The group of nodes that `lockstep doctor` examines together, as one node sees it."""

    index: int = 0  # of this node
    labels: tuple[str, ...]
    hosts: tuple[str, ...] = ()  # by node
    endpoint: Endpoint | None = None  # `None` for a single node
    interface: str | None = None
    reach: tuple[Interface, ...] = ()  # of each node, once all have connected to each other
    #: child processes that start the ranks of a test all-reduce; forked before this process had threads
    starters: tuple[Child, ...] = ()
    _lost: set[int] = field(default_factory=set)

    @property
    def alone(self) -> bool:
        """Whether there is only one node."""
        return len(self.labels) == 1

    @property
    def several_hosts(self) -> bool:
        """Whether the nodes are on more than one host."""
        return len(set(self.hosts)) > 1

    def part(self, name: str) -> dist.Store:
        """Return a `PrefixStore` over the rendezvous's store, with a prefix made of `name`.

        All nodes pass the same `name` to exchange values.
        """
        from torch.distributed import PrefixStore

        assert self.endpoint is not None, "there are several nodes"
        return PrefixStore(f"doctor/{name}", self.endpoint.store)

    def gather(self, question: str, own: Any, seconds: float = PATIENCE) -> list[Any]:
        """Return the values that all nodes pass as `own` for the same `question`, in the order of nodes.

        `question` is the name of the exchange, the same on all nodes.

        Raises:
            LostError: if a node does not send its value within `seconds`.
        """
        if self.alone:
            return [own]
        members = Members(self.part("questions"), self.index, self.labels, hint="", check=go_on)
        try:
            values = members.ask(question, [own], lambda given: given, seconds)
        except WorldError as error:
            raise LostError(error.message) from error
        self._lost |= {index for index, one in enumerate(values) if one is None}
        if self._lost:
            names = ", ".join(self.labels[index] for index in sorted(self._lost))
            raise LostError(f"nothing more was heard of {names} within {seconds:g} s")
        return [one[0] for one in values]

    def gone(self) -> str:
        """Return an error message if the network interface to the other nodes is gone, else ""."""
        if not self.reach:
            return ""
        own = self.reach[self.index]
        if own in interfaces():
            return ""
        return f"the interface {own} of {self.labels[self.index]} is gone"

    def close(self) -> None:
        """Leave the rendezvous; the node that hosts the store waits until the others have left."""
        if self.endpoint is None:
            return
        store = self.part("left")
        store.set(str(self.index), "")
        if self.endpoint.hosts:
            others = [str(k) for k in range(len(self.labels)) if k not in self._lost]
            await_any(store, [others], _LEAVING_SECONDS)
        self.endpoint.close()


def join_nodes(config: RendezvousConfig, seconds: float, interface: str | None) -> NodeGroup:
    """Join the other nodes at the rendezvous `config`; return the group of all nodes.

    `seconds` is the timeout. `interface` is the network interface to use; with `None` it is chosen by the
    connectivity check.

    Raises:
        WorldError: if a node does not join; all nodes that have joined get the same error.
    """
    with contextlib.ExitStack() as stack:
        config = replace(config, least=None, seconds=seconds)
        endpoint = enter(config, go_on)
        stack.callback(endpoint.close)
        token = secrets.token_hex(8)
        cards = _join(config, endpoint, token)
        stack.pop_all()
    return NodeGroup(
        index=[one.token for one in cards].index(token),
        labels=tuple(f"node {k} ({one.launcher.name})" for k, one in enumerate(cards)),
        hosts=tuple(one.node.host for one in cards),
        endpoint=endpoint,
        interface=interface,
    )


def _join(config: RendezvousConfig, endpoint: Endpoint, token: str) -> tuple[JoinEntry, ...]:
    """Join the other nodes; return the entry that each has published about itself, in the order of nodes.

    `endpoint` is this node's connection to the rendezvous; `token` identifies the entry of this node.
    """
    keys = RendezvousKeys(endpoint.store, go_on)
    first = 0 if endpoint.hosts else config.count
    card = JoinEntry(
        token=token,
        node=NodeInfo.here(os.getpid()),
        launcher=Launcher(ranks=1, name=host.name()),
        common=Common.new(replicas=1),
        address=ServerAddress(port=0, token=""),
        round=0,
        index=first if config.index is None else config.index,
        generation=0,
    )
    hint = functools.partial(missing_hint, config, hosts=endpoint.hosts)
    try:
        cards = Join(keys, 1, card, (), may_close=True, config=config, hint=hint).wait()
    except WorldError:
        if endpoint.hosts:
            keys.linger(1)
        raise
    if cards is None:
        raise WorldError(f"{config.count} nodes have joined at {config.place} without this one")
    return cards
