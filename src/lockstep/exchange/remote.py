"""A worker's end of an optimizer that lives in servers: each holds some parameters whole, and updates them.

worker                                         server
  gradients of batch t, learning rates  ─────►   waits for all workers' gradients of batch t,
                                                 adds them in tree order, steps
  parameters with at least t - K updates ◄─────  at once, or as soon as it has stepped
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lockstep.errors import StepError
from lockstep.exchange import optimizers
from lockstep.exchange.base import Forest
from lockstep.exchange.flat import as_real
from lockstep.exchange.frames import Kind
from lockstep.exchange.links import Link, Links
from lockstep.exchange.rows import Rows, Spec
from lockstep.layout.servers import deal

#: One tensor per parameter; `None` where no replica of this rank has used it.
Node = Sequence[torch.Tensor | None]


@dataclass(slots=True)
class _Shard:
    """The parameters that one server holds.

    Attributes:
        link: to the server.
        places: which of the optimizer's parameters they are.
        rows: how they lie in memory.
        outgoing: memory for this rank's tree nodes, a row each.
        incoming: memory for what comes back.
        has: how many updates those have that this rank knows.
    """

    link: Link
    places: list[int]
    rows: Rows
    outgoing: torch.Tensor
    incoming: torch.Tensor
    has: int = -1


class _Elsewhere(defaultdict[Any, Any]):
    """What an optimizer has in the place of its state while the servers hold that."""

    def clear(self) -> None:
        """Refuse: there is nothing here to clear, and the servers would keep theirs."""
        raise _state_changed()


class RemoteOptimizer:
    """An optimizer whose parameters and state are with the servers, from its first step on.

    Args:
        optimizer: the script's own; its settings are sent in every step, and it never steps itself.
        number: which optimizer of its model it is.
        links: to the servers.
        forest: the workers' tree nodes.
        staleness: by how many updates parameters may be behind.
        nothing: what a missing gradient is.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        number: int,
        links: Links,
        forest: Forest,
        staleness: int,
        nothing: float,
    ) -> None:
        self._optimizer, self._number = optimizer, number
        self._words = optimizers.describe(optimizer)
        optimizers.numbers(optimizer)  # refuses what no server could be told of
        self.parameters: list[torch.nn.Parameter] = [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        self._leads, self._staleness, self._nothing = links.leads, staleness, nothing
        self._shards = self._deal(links, forest)
        self._begun = False
        self._life = self._steps = 0
        self._versions: list[int] = []  # of the parameters, as the servers gave them
        self._elsewhere: _Elsewhere | None = None
        self._check_hooks()
        # A script may load a state at any time: the servers get it then, with the newest parameters.
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.catch_up())
        optimizer.register_load_state_dict_post_hook(lambda *_: self.begins_anew())

    def _deal(self, links: Links, forest: Forest) -> list[_Shard]:
        owners = deal([p.numel() for p in self.parameters], len(links.links))
        shards = []
        for index, link in enumerate(links.links):
            places = [place for place, owner in enumerate(owners) if owner == index]
            if not places:
                continue  # fewer parameters than servers
            rows = Rows([Spec.of(self.parameters[place]) for place in places])
            outgoing = torch.zeros(forest.own, rows.bytes, dtype=torch.uint8)
            incoming = torch.zeros(rows.bytes, dtype=torch.uint8)
            shards.append(_Shard(link, places, rows, outgoing, incoming))
        return shards

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Whether it is the script's `optimizer`."""
        return self._optimizer is optimizer

    # --- beginning -------------------------------------------------------------------------------

    def begins_anew(self) -> None:
        """Parameters or state were loaded here: the servers get them with the next step."""
        self._begun = False

    def bring_back(self) -> None:
        """Have the state here that the servers have, as if the optimizer had stepped here."""
        if not self._begun:
            return
        state = self._memory()
        self._begun = False
        self._optimizer.state = defaultdict(dict)
        for place, own in sorted(state.items()):
            self._optimizer.state[self.parameters[place]] = own

    def _begin(self) -> None:
        """Let the servers hold what is here; the rank that leads sends it."""
        self._begun = True
        self._life += 1
        for shard in self._shards:
            shard.has = self._steps
            if self._leads:
                self._send(shard)
        self._optimizer.state = self._elsewhere = _Elsewhere(dict)  # it is theirs now

    def _send(self, shard: _Shard) -> None:
        own = [self.parameters[place] for place in shard.places]
        state, tensors = optimizers.pack(self._optimizer, own)
        memory = Rows([Spec.of(tensor) for tensor in tensors])
        place = {id(p): number for number, p in enumerate(own)}
        groups = [
            [place[id(p)] for p in group["params"] if id(p) in place]
            for group in self._optimizer.param_groups
        ]
        meta: dict[str, Any] = {
            "parameters": [spec.words() for spec in shard.rows.specs],
            "tensors": [spec.words() for spec in memory.specs],
            "state": state,
            "groups": groups,
            "optimizer": self._words,
        }
        rows = [shard.rows.row(own), memory.row(tensors)]
        tag, number = self._number, self._steps
        shard.link.send(Kind.BEGIN, rows, tag=tag, number=number, place=self._life, meta=meta)

    # --- steps -----------------------------------------------------------------------------------

    def step(self, nodes: Sequence[Node], place: int) -> None:
        """Let the servers update the parameters, and take such as are new enough.

        Args:
            nodes: this rank's tree nodes, each with a gradient for each parameter.
            place: the batch that they are of.

        Raises:
            PeerError: if a server or another rank is gone.
        """
        self._check_hooks()
        self._check_parameters()
        if not self._begun:
            self._begin()
        else:
            self._check_untouched()
        self._steps += 1
        groups = optimizers.numbers(self._optimizer)
        for shard in self._shards:
            unused = self._fill(shard, nodes)
            meta = {**self._wish(shard, self._steps - self._staleness), "groups": groups}
            shard.link.send(
                Kind.UPDATE,
                [shard.outgoing],
                tag=self._number,
                number=self._steps,
                place=place,
                meta={**meta, "unused": unused},
            )
        self._take(self._shards)
        # A scheduler that was made before the run knew the optimizer counts steps of its own; it warns
        # where it finds none.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _check_hooks(self) -> None:
        """Refuse hooks around steps: they would look at gradients and state that only servers have."""
        own = self._optimizer
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
        """Refuse parameters that came or went since the run was given the optimizer."""
        now = [p for group in self._optimizer.param_groups for p in group["params"]]
        known = self.parameters
        if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
            raise StepError(
                f"{type(self._optimizer).__name__} has {len(now)} parameters, of which not all are "
                f"those {len(known)} that it had when it was given to run.optimizer",
                hint="call add_param_group before run.optimizer",
            )

    def _check_untouched(self) -> None:
        """Refuse parameters and state that the script has changed: the servers know nothing of it."""
        state = self._optimizer.state
        if state is not self._elsewhere or any(state.values()):
            raise _state_changed()
        if self._versions != [p._version for p in self.parameters]:
            raise StepError(
                f"the script has changed parameters of {type(self._optimizer).__name__} itself; expected "
                "only its steps to do so, which happen in the servers",
                hint="leave out the staleness: then every worker updates its own copy",
            )

    def _fill(self, shard: _Shard, nodes: Sequence[Node]) -> list[int]:
        """Write a server's share of the nodes; return which of its parameters have no gradient here."""
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
                    as_real(view).fill_(self._nothing)
                else:
                    view.copy_(gradient)
                    used.add(own)
        return [own for own in range(len(shard.places)) if own not in used]

    def _wish(self, shard: _Shard, least: int) -> dict[str, int]:
        return {"life": self._life, "least": max(0, least), "has": shard.has}

    def _take(self, shards: Sequence[_Shard]) -> None:
        """Take parameters that servers have been asked for."""
        for shard in shards:
            answer = shard.link.receive(Kind.PARAMETERS, [shard.incoming])
            shard.has = answer.header.number
            if answer.header.payload:
                own: list[torch.Tensor] = [self.parameters[place] for place in shard.places]
                with torch.no_grad():
                    torch._foreach_copy_(own, shard.rows.views(shard.incoming))
        self._versions = [p._version for p in self.parameters]

    # --- the newest ------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Take parameters that lack no update: those of all batches that this rank has computed."""
        behind = [shard for shard in self._shards if self._begun and shard.has < self._steps]
        for shard in behind:
            meta = self._wish(shard, self._steps)
            shard.link.send(Kind.PARAMETERS, tag=self._number, meta=meta)
        self._take(behind)

    def state(self) -> dict[str, Any]:
        """Return the `state_dict` that the optimizer would have if it had stepped here."""
        own = self._optimizer.state_dict()
        if not self._begun:
            return own
        return {**own, "state": dict(sorted(self._memory().items()))}

    def _memory(self) -> dict[int, dict[str, Any]]:
        """Return the state that the servers have, by the places of parameters."""
        state: dict[int, dict[str, Any]] = {}
        for shard in self._shards:
            meta = self._wish(shard, self._steps)
            shard.link.send(Kind.MEMORY, tag=self._number, meta=meta)
            answer = shard.link.receive(Kind.MEMORY)
            rows = Rows([Spec.parse(words) for words in answer.meta["tensors"]])
            found = optimizers.unpack(answer.meta["state"], rows.views(answer.payload))
            state |= {shard.places[place]: one for place, one in found.items()}
        return state


def _state_changed() -> StepError:
    return StepError(
        "the script has changed the state of an optimizer itself; expected only its steps to do so, which "
        "happen in the servers",
        hint="optimizer.load_state_dict(…) reaches the servers; or leave out the staleness: then every "
        "worker updates its own copy",
    )
