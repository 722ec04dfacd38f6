"""Server side of an optimizer: its parameters, updated once per global batch.

Update `t` is made of the gradients of batch `t` of all workers, as soon as all are there. Every worker is
sent the parameters after every update, and takes those that it needs when it needs them.
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
from lockstep.engine.parameter_server.rows import Rows, Spec
from lockstep.errors import MismatchError, ModelError


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """A message of a worker, and the connection for the answer."""

    connection: Connection
    message: Message

    @property
    def header(self) -> Header:
        """The message's header."""
        return self.message.header


class ServerOptimizer:
    """The parameters of one optimizer that are this server's.

    When workers load other values, rank 0 sends these before its next gradients.
    """

    def __init__(self, number: int, forest: Forest, pool: Pool) -> None:
        self._number, self._forest, self._pool = number, forest, pool
        self._version = 0
        self._rows = Rows([])
        self._row = torch.empty(0, dtype=torch.uint8)
        self._parameters: list[torch.nn.Parameter] = []
        self._optimizer: Optimizer | None = None
        self._updates: dict[int, dict[int, WorkerRequest]] = defaultdict(dict)  # by number, by rank
        self._states: list[WorkerRequest] = []  # for the state after so many updates

    @property
    def waits(self) -> bool:
        """Whether a worker waits for another one."""
        return bool(self._updates or self._states)

    def begin(self, message: Message) -> None:
        """Replace the parameters and the optimizer by those of a message.

        Raises:
            ModelError: if there can be no such optimizer.
        """
        meta = message.meta
        self._rows = Rows([Spec.parse(words) for words in meta["parameters"]])
        state = Rows([Spec.parse(words) for words in meta["tensors"]])
        self._row = message.payload[: self._rows.bytes]
        views = self._rows.views(self._row)
        self._parameters = [torch.nn.Parameter(view) for view in views]
        groups = [[self._parameters[i] for i in group] for group in meta["groups"]]
        made = optimizer_codec.build(meta["optimizer"], groups)
        tensors = state.views(message.payload[self._rows.bytes :].clone())
        for place, own in optimizer_codec.unpack(meta["state"], tensors).items():
            made.state[self._parameters[place]] = own
        self._optimizer, self._version = made, message.header.number

    def update(self, request: WorkerRequest) -> None:
        """Take one worker's gradients of a batch; after the last worker's, update.

        Raises:
            MismatchError: if workers send gradients of different batches or updates.
        """
        self._updates[request.header.number][request.connection.rank] = request
        self._advance()

    def request_state(self, request: WorkerRequest) -> None:
        """Answer with the optimizer's state after the update that the request names."""
        self._states.append(request)
        self._advance()

    def forget(self, connection: Connection) -> None:
        """Drop the requests of a worker that has gone."""
        self._states = [r for r in self._states if r.connection is not connection]

    def _advance(self) -> None:
        while len(self._updates.get(self._version + 1, ())) == self._forest.size:
            assert self._optimizer is not None, "rank 0 has sent it before its gradients"
            by_rank = self._updates.pop(self._version + 1)
            requests = [by_rank[rank] for rank in range(self._forest.size)]
            self._apply(self._optimizer, [request.message for request in requests])
            self._send_version([request.connection for request in requests])
        due = [request for request in self._states if request.header.number == self._version]
        self._states = [request for request in self._states if request not in due]
        for request in due:
            self._send_state(request.connection)

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
        """Return the sum of all nodes, in the first worker's memory."""
        rows: list[torch.Tensor] = [
            row
            for message, count in zip(messages, self._forest.counts, strict=True)
            for row in message.payload.view(count, -1)
        ]
        for segment in self._rows.segments:
            self._forest.sum_in_place([segment.of(row) for row in rows])
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
                    f"the optimizer has other settings on rank {rank} than on rank 0"
                )

    def _send_version(self, connections: Sequence[Connection]) -> None:
        """Send all workers the current parameters; some receive them a few updates later."""
        memory = self._pool.take(self._row.numel())
        memory.copy_(self._row)
        release = self._pool.shared(memory, len(connections))
        fields = {"tag": self._number, "number": self._version}
        for connection in connections:
            connection.send(Kind.VERSION, [memory], release=release, **fields)

    def _send_state(self, connection: Connection) -> None:
        assert self._optimizer is not None
        entries, tensors = optimizer_codec.pack(self._optimizer, self._parameters)
        rows = Rows([Spec.of(tensor) for tensor in tensors])
        meta: dict[str, Any] = {"state": entries, "tensors": [spec.words() for spec in rows.specs]}
        connection.send(Kind.STATE, [rows.row(tensors)], number=self._version, meta=meta)


def _check_settings(optimizer: Optimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an optimizer that counts in its groups: the next step brings the worker's settings again."""
    for now, words in zip(optimizer_codec.settings_of(optimizer), given, strict=True):
        changed = [name for name, value in words.items() if repr(now[name]) != repr(value)]
        if changed:
            raise ModelError(
                f"a step of {type(optimizer).__name__} changes {', '.join(changed)} of its parameter "
                "groups, which in servers no worker would learn of",
                hint="leave out the staleness: then every worker updates its own copy",
            )
