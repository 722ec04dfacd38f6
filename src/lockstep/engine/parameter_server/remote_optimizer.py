"""Worker's client of an optimizer that runs in parameter servers; each server updates some parameters.

worker                                         server
  gradients of batch t, learning rates  ─────►   waits for all workers' gradients of batch t,
                                                 adds them in a fixed order, steps
  parameters with t + 1 updates         ◄─────   as soon as it has stepped

A version is the values of the parameters after an update. A worker receives all versions in order, and
reads the next one from its connection when it needs it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.flat import as_real
from lockstep.engine.parameter_server import optimizer_codec
from lockstep.engine.parameter_server.client import Client, Clients
from lockstep.engine.parameter_server.connection import Pool
from lockstep.engine.parameter_server.messages import Kind
from lockstep.engine.parameter_server.rows import RowLayout
from lockstep.engine.strategies.gradient_accumulation import NO_GRADIENT
from lockstep.errors import StepError

#: Gradients of one tree node, a tensor per parameter; `None` if the node's replicas have not used it.
Node = Sequence[torch.Tensor | None]


@dataclass(slots=True)
class _Shard:
    """The parameters of an optimizer that one server updates, and memory for its messages.

    Attributes:
        client: connection to the server.
        places: indices of these parameters among those of the optimizer.
        rows: layout of the parameters in a row of bytes.
        outgoing: memory for this rank's tree nodes (sums over its replicas), one row each.
        taken: rows with the versions that the worker stores, the oldest first.
    """

    client: Client
    places: list[int]
    rows: RowLayout
    outgoing: torch.Tensor
    taken: deque[torch.Tensor]


class _StateInServers(defaultdict[Any, Any]):
    """Empty state of a worker's optimizer, while the actual state is in the servers."""

    def clear(self) -> None:
        """Raise a `StepError`: a script cannot clear the state in the servers."""
        raise _state_changed()


class RemoteOptimizer:
    """Client of an optimizer whose parameters and state are in servers.

    Its methods raise the same errors as those of `Client`.

    Args:
        number: number of the optimizer among those of the model.

    Attributes:
        has_begun: whether the servers have the current parameters and state.
        coming: number of versions of the parameters that were requested, but not received yet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        clients: Clients,
        forest: Forest,
    ) -> None:
        self.optimizer, self._number = optimizer, number
        self._words = optimizer_codec.describe(optimizer)
        optimizer_codec.settings_of(optimizer)  # raises an error for values that JSON has not
        self.parameters: list[torch.nn.Parameter] = [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        self._leads, self._pool = clients.leads, Pool()
        self._shards: list[_Shard] = []
        owners = deal([p.numel() for p in self.parameters], len(clients.all))
        for index, client in enumerate(clients.all):
            places = [place for place, owner in enumerate(owners) if owner == index]
            if places:  # there may be fewer parameters than servers
                rows = RowLayout.of([self.parameters[place] for place in places])
                outgoing = torch.zeros(forest.own, rows.bytes, dtype=torch.uint8)
                self._shards.append(_Shard(client, places, rows, outgoing, deque()))
                client.expect(number, partial(self._pool.take, rows.bytes))
        self.has_begun = False
        self.coming = self._steps = 0
        self._in_servers: _StateInServers | None = None
        self._check_hooks()
        # A script may load a state at any time: the next step sends it to the servers.
        optimizer.register_load_state_dict_post_hook(lambda *_: self.reset())

    # --- beginning -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Mark parameters and state in the servers as outdated: `begin` must send them again."""
        self.has_begun = False

    def bring_back(self) -> None:
        """Copy the optimizer's state from the servers back to this worker's optimizer.

        Parameters and state in the servers are marked as outdated.
        """
        if not self.has_begun:
            return
        state = self._fetch_state()
        self.has_begun = False
        self.optimizer.state = defaultdict(dict)
        for place, own in sorted(state.items()):
            self.optimizer.state[self.parameters[place]] = own

    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Make the servers create the optimizer; rank 0 sends them its parameters and state.

        `values`: the newest version of the parameters; all versions must have been received.
        """
        assert not self.coming, "all updates are complete before servers get new parameters"
        self.has_begun = True
        for shard in self._shards:
            if self._leads:
                self._send(shard, [values[place] for place in shard.places])
        self.optimizer.state = self._in_servers = _StateInServers(dict)

    def _send(self, shard: _Shard, values: Sequence[torch.Tensor]) -> None:
        own = [self.parameters[place] for place in shard.places]
        state, memory = optimizer_codec.pack(self.optimizer, own)
        place = {id(p): number for number, p in enumerate(own)}
        groups = [
            [place[id(p)] for p in group["params"] if id(p) in place]
            for group in self.optimizer.param_groups
        ]
        meta = {
            "parameters": shard.rows.words(),
            "groups": groups,
            "optimizer": self._words,
            **state,
        }
        rows = [shard.rows.row(values), memory]
        shard.client.send(Kind.BEGIN, rows, tag=self._number, number=self._steps, meta=meta)

    # --- steps -----------------------------------------------------------------------------------

    def step(self, nodes: Sequence[Node], place: int) -> None:
        """Send gradients to the servers, which then update the parameters.

        The new version of the parameters is returned by `receive`.

        Args:
            nodes: this rank's tree nodes (sums over its replicas), each with a gradient per
                parameter.
            place: number of the batch; the servers check that all ranks send the same number.

        Raises:
            StepError: if the script has changed the optimizer's hooks, parameters or state.
        """
        self._check_hooks()
        self._check_parameters()
        if self.optimizer.state is not self._in_servers or any(self.optimizer.state.values()):
            raise _state_changed()
        number = self._steps + 1
        groups = optimizer_codec.settings_of(self.optimizer)
        for shard in self._shards:
            unused = self._fill(shard, nodes)
            shard.client.send(
                Kind.UPDATE,
                [shard.outgoing],
                tag=self._number,
                number=number,
                place=place,
                meta={"groups": groups, "unused": unused},
            )
        self._steps = number
        self.coming += 1
        # A scheduler that was created before `run.optimizer` warns unless this attribute is set.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _check_hooks(self) -> None:
        """Raise a `StepError` if the optimizer has step hooks, which would not see the gradients.

        The step runs in the servers, where the gradients and the state are.
        """
        own = self.optimizer
        hooks = [
            *(own._optimizer_step_pre_hooks.values(), own._optimizer_step_post_hooks.values()),
            torch_optimizer._global_optimizer_pre_hooks.values(),
            torch_optimizer._global_optimizer_post_hooks.values(),
        ]
        if any(hooks):
            raise StepError(
                f"{type(own).__name__} has hooks around its steps, which happen in the servers; "
                "expected none",
                hint="leave out register_step_pre_hook and register_step_post_hook, or the staleness: then "
                "every worker updates its own copy",
            )

    def _check_parameters(self) -> None:
        """Raise a `StepError` if parameters were added or removed after `run.optimizer`."""
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        if list(map(id, now)) != list(map(id, self.parameters)):
            raise StepError(
                f"{type(self.optimizer).__name__} has {len(now)} parameters, of which not all are "
                f"those {len(self.parameters)} that it had when it was given to run.optimizer",
                hint="call add_param_group before run.optimizer",
            )

    def _fill(self, shard: _Shard, nodes: Sequence[Node]) -> list[int]:
        """Copy this rank's gradients into the memory for one server, the rows of `shard.outgoing`.

        Return the indices of the server's parameters that have no gradient on this rank.

        Raises:
            StepError: if there are no gradients of this batch.
        """
        if len(nodes) != len(shard.outgoing):
            raise StepError(
                "an optimizer stepped without gradients; expected a backward pass of this batch",
                hint="call run.backward(loss) before optimizer.step()",
            )
        used: set[int] = set()
        for node, row in zip(nodes, shard.outgoing, strict=True):
            views = shard.rows.views(row)
            for own, (place, view) in enumerate(zip(shard.places, views, strict=True)):
                gradient = node[place]
                if gradient is None:
                    as_real(view).fill_(NO_GRADIENT)
                else:
                    view.copy_(gradient)
                    used.add(own)
        return [own for own in range(len(shard.places)) if own not in used]

    # --- versions --------------------------------------------------------------------------------

    def receive(self) -> list[torch.Tensor]:
        """Receive the next version of the parameters; return one tensor per parameter.

        The memory of the tensors stays in use until `keep` frees it.
        """
        values: list[Any] = [None] * len(self.parameters)
        for shard in self._shards:
            row = shard.client.version(self._number)
            shard.taken.append(row)
            for place, view in zip(shard.places, shard.rows.views(row), strict=True):
                values[place] = view
        self.coming -= 1
        return values

    def keep(self, count: int) -> None:
        """Free the memory of all received versions of the parameters except the newest `count`."""
        for shard in self._shards:
            while len(shard.taken) > count:
                self._pool.give(shard.taken.popleft())

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the optimizer's `state_dict`, with the state fetched from the servers."""
        own = self.optimizer.state_dict()
        if not self.has_begun:
            return own
        return {**own, "state": dict(sorted(self._fetch_state().items()))}

    def _fetch_state(self) -> dict[int, dict[str, Any]]:
        """Return the state in the servers after all updates, keyed by the parameter's index."""
        state: dict[int, dict[str, Any]] = {}
        for shard in self._shards:
            shard.client.send(Kind.STATE, tag=self._number, number=self._steps)
            answer = shard.client.receive(Kind.STATE)
            found = optimizer_codec.unpack(answer.meta, answer.payload)
            state |= {shard.places[place]: one for place, one in found.items()}
        return state


def deal(sizes: Sequence[int], servers: int) -> list[int]:
    """Return, for each parameter, the index of the server that updates the parameter.

    The parameters are assigned from the largest to the smallest, each to the server with the fewest
    elements so far. `sizes`: number of elements of each parameter. `servers`: number of servers.
    """
    loads, owners = [0] * servers, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner = min(range(servers), key=lambda server: (loads[server], server))
        owners[place] = owner
        loads[owner] += sizes[place]
    return owners


def _state_changed() -> StepError:
    return StepError(
        "the script has changed the state of an optimizer itself; expected only its steps to do so, which "
        "happen in the servers",
        hint="optimizer.load_state_dict(…) reaches the servers; or leave out the staleness: then every "
        "worker updates its own copy",
    )
