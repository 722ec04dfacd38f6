"""Optimizer in a parameter server, which updates the server's parameters once per global batch.

The server steps as soon as it has received the gradients of a batch from all workers. After every update it
sends the new parameters to all workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.engine.exchange.base import Forest
from lockstep.engine.parameter_server import optimizer_codec
from lockstep.engine.parameter_server.connection import Connection, Pool
from lockstep.engine.parameter_server.messages import Header, Kind, Message
from lockstep.engine.parameter_server.rows import RowLayout
from lockstep.errors import MismatchError, ModelError


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A message of a worker, and the connection for the response."""

    connection: Connection
    message: Message

    @property
    def header(self) -> Header:
        """The header of the message."""
        return self.message.header


class ServerOptimizer:
    """One server's part of an optimizer: the parameters that this server updates, and their state.

    If the script loads other parameters or state, rank 0 sends them to the server before its next
    gradients.
    """

    def __init__(self, number: int, forest: Forest, pool: Pool) -> None:
        self._number, self._forest, self._pool = number, forest, pool
        self._version = 0
        self._rows = RowLayout([])
        self._row = torch.empty(0, dtype=torch.uint8)
        self._parameters: list[torch.nn.Parameter] = []
        self._optimizer: Optimizer | None = None
        self._updates: dict[int, dict[int, WorkerRequest]] = defaultdict(dict)  # by number, by rank
        self._states: list[WorkerRequest] = []  # for the state after the update that they name

    @property
    def waits(self) -> bool:
        """Whether requests of some workers are pending until other workers have sent theirs."""
        return bool(self._updates or self._states)

    def begin(self, message: Message) -> None:
        """Create the optimizer from rank 0's `message`: parameters, settings and state.

        Raises:
            ModelError: if the optimizer's class cannot be imported, or not be built from its
                defaults.
        """
        meta = message.meta
        self._rows = RowLayout.parse(meta["parameters"])
        self._row = message.payload[: self._rows.bytes]
        views = self._rows.views(self._row)
        self._parameters = [torch.nn.Parameter(view) for view in views]
        groups = [[self._parameters[i] for i in group] for group in meta["groups"]]
        made = optimizer_codec.build(meta["optimizer"], groups)
        state = message.payload[self._rows.bytes :]
        for place, own in optimizer_codec.unpack(meta, state).items():
            made.state[self._parameters[place]] = own
        self._optimizer, self._version = made, message.header.number

    def update(self, request: WorkerRequest) -> None:
        """Store one worker's gradients of a batch; step when all workers' gradients have arrived.

        After the step, send the new parameters to all workers.
        """
        self._updates[request.header.number][request.connection.rank] = request
        self._advance()

    def request_state(self, request: WorkerRequest) -> None:
        """Send the optimizer's state to a worker, once the update with the request's number is done.

        The number is in the message's header; the state is that after exactly this update.
        """
        self._states.append(request)
        self._advance()

    def forget(self, connection: Connection) -> None:
        """Drop the requests for state of a worker that has disconnected."""
        self._states = [r for r in self._states if r.connection is not connection]

    def _advance(self) -> None:
        while len(self._updates.get(self._version + 1, ())) == self._forest.size:
            assert self._optimizer is not None, "rank 0 has sent it before its gradients"
            by_rank = self._updates.pop(self._version + 1)
            requests = [by_rank[rank] for rank in range(self._forest.size)]
            self._apply(self._optimizer, [request.message for request in requests])
            # Sent from one copy, since later updates change the parameters.
            memory = self._pool.take(self._row.numel()).copy_(self._row)
            release = self._pool.shared(memory, len(requests))
            fields = {"tag": self._number, "number": self._version}
            for request in requests:
                request.connection.send(Kind.VERSION, [memory], release=release, **fields)
        due = [request for request in self._states if request.header.number == self._version]
        self._states = [request for request in self._states if request not in due]
        for request in due:
            assert self._optimizer is not None
            meta, row = optimizer_codec.pack(self._optimizer, self._parameters)
            request.connection.send(Kind.STATE, [row], number=self._version, meta=meta)

    def _apply(self, optimizer: Optimizer, messages: Sequence[Message]) -> None:
        self._check(messages)
        groups = messages[0].meta["groups"]
        optimizer_codec.set_settings(optimizer, groups)
        gradients = self._rows.views(self._sum(messages))
        unused = set.intersection(*(set(message.meta["unused"]) for message in messages))
        for place, parameter in enumerate(self._parameters):
            parameter.grad = None if place in unused else gradients[place]
        optimizer.step()
        _check_settings(optimizer, groups)
        for parameter in self._parameters:
            parameter.grad = None
        for message in messages:
            self._pool.give(message.payload)
        self._version += 1

    def _sum(self, messages: Sequence[Message]) -> torch.Tensor:
        """Sum the gradients of all workers in a fixed order; return the sum as a row of bytes.

        `messages`: one message per worker, in rank order. The sum overwrites the first message's gradients.
        """
        rows: list[torch.Tensor] = [
            row
            for message, count in zip(messages, self._forest.counts, strict=True)
            for row in message.payload.view(count, -1)
        ]
        for parts in zip(*map(self._rows.segments, rows), strict=True):
            self._forest.sum_in_place(parts)
        return rows[0]

    def _check(self, messages: Sequence[Message]) -> None:
        first = messages[0]
        for rank, (message, count) in enumerate(zip(messages, self._forest.counts, strict=True)):
            if message.header.place != first.header.place:
                raise MismatchError(f"rank {rank} computes gradients of another batch than rank 0")
            if message.header.payload != count * self._rows.bytes:
                raise MismatchError(f"rank {rank} holds other parameters than rank 0")
            if repr(message.meta["groups"]) != repr(first.meta["groups"]):
                raise MismatchError(
                    f"the optimizer has different settings on rank {rank} than on rank 0"
                )


def _check_settings(optimizer: Optimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `ModelError` if a step has changed settings of parameter groups, such as `lr`.

    The change would be lost, since workers send the settings with each batch's gradients. `given`: the
    settings of each group that the workers have sent for this step.
    """
    for now, words in zip(optimizer_codec.settings_of(optimizer), given, strict=True):
        changed = [name for name, value in words.items() if repr(now[name]) != repr(value)]
        if changed:
            raise ModelError(
                f"a step of {type(optimizer).__name__} changes {', '.join(changed)} of its parameter "
                "groups, which in servers no worker would learn of",
                hint="leave out the staleness: then every worker updates its own copy",
            )
