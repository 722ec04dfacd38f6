"""Parameters that a server holds, and their optimizer: one update per global batch.

Update `t` is made of the gradients of batch `t` of all workers, as soon as all are there. Every worker is
sent the parameters after every update, and takes those that it needs when it needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import ModelError
from lockstep.exchange import optimizers
from lockstep.exchange.base import Forest
from lockstep.exchange.frames import Kind
from lockstep.exchange.rows import Rows, Spec
from lockstep.server.connection import Connection, Frame
from lockstep.server.memory import Lease, Pool
from lockstep.server.sums import DifferError


@dataclass(frozen=True, slots=True)
class _Gradients:
    """One worker's gradients of a batch."""

    connection: Connection
    frame: Frame


class Holder:
    """The parameters of one optimizer that are this server's.

    They may begin anew, with other values, when workers have loaded some. Rank 0 sends these before its
    next gradients, without which there is no further update.

    Args:
        number: of the optimizer.
        forest: the workers' tree nodes.
        pool: where memory comes from.
    """

    def __init__(self, number: int, forest: Forest, pool: Pool) -> None:
        self._number, self._forest, self._pool = number, forest, pool
        self._version = 0
        self._rows = Rows([])
        self._row = torch.empty(0, dtype=torch.uint8)
        self._parameters: list[torch.nn.Parameter] = []
        self._optimizer: Optimizer | None = None
        self._batches: dict[int, dict[int, _Gradients]] = {}  # by the number of the update, by rank
        self._questions: list[tuple[Connection, int]] = []  # for the state after so many updates

    @property
    def waits(self) -> bool:
        """Whether a worker waits for another one."""
        return bool(self._batches or self._questions)

    # --- what workers ask for --------------------------------------------------------------------

    def begin(self, frame: Frame) -> None:
        """Hold other parameters, with another optimizer.

        Raises:
            ModelError: if there can be no such optimizer.
        """
        meta = frame.meta
        self._rows = Rows([Spec.parse(words) for words in meta["parameters"]])
        memory = Rows([Spec.parse(words) for words in meta["tensors"]])
        self._row = frame.payload[: self._rows.bytes]
        views = self._rows.views(self._row)
        self._parameters = [torch.nn.Parameter(view) for view in views]
        groups = [[self._parameters[i] for i in group] for group in meta["groups"]]
        made = optimizers.build(meta["optimizer"], groups)
        tensors = memory.views(frame.payload[self._rows.bytes :].clone())
        for place, state in optimizers.unpack(meta["state"], tensors).items():
            made.state[self._parameters[place]] = state
        self._optimizer, self._version = made, frame.header.number

    def update(self, connection: Connection, frame: Frame) -> None:
        """Take one worker's gradients of a batch; update, if these were the last.

        Raises:
            DifferError: if workers do not mean the same batch, or the same update.
        """
        batch = self._batches.setdefault(frame.header.number, {})
        batch[connection.rank] = _Gradients(connection, frame)
        self._advance()

    def ask(self, connection: Connection, frame: Frame) -> None:
        """Answer with the optimizer's state after the update that a worker names."""
        self._questions.append((connection, frame.header.number))
        self._advance()

    def forget(self, connection: Connection) -> None:
        """A worker is gone: it needs no answer."""
        self._questions = [one for one in self._questions if one[0] is not connection]

    # --- updates ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        while len(self._batches.get(self._version + 1, ())) == self._forest.size:
            assert self._optimizer is not None, "rank 0 has sent it before its gradients"
            batch = self._batches.pop(self._version + 1)
            workers = [batch[rank] for rank in range(self._forest.size)]
            self._apply(self._optimizer, [worker.frame for worker in workers])
            self._send_version([worker.connection for worker in workers])
        due = [connection for connection, number in self._questions if number == self._version]
        self._questions = [one for one in self._questions if one[1] != self._version]
        for connection in due:
            self._send_memory(connection)

    def _apply(self, optimizer: Optimizer, frames: Sequence[Frame]) -> None:
        self._check(frames)
        optimizers.set_numbers(optimizer, frames[0].meta["groups"])
        gradients = self._rows.views(self._sum(frames))
        unused = set.intersection(*(set(frame.meta["unused"]) for frame in frames))
        for place, parameter in enumerate(self._parameters):
            parameter.grad = None if place in unused else gradients[place]
        optimizer.step()
        _check_numbers(optimizer, frames[0].meta["groups"])
        for parameter in self._parameters:
            parameter.grad = None
        for frame in frames:
            self._pool.give(frame.payload)
        self._version += 1

    def _sum(self, frames: Sequence[Frame]) -> torch.Tensor:
        """Return the sum of all nodes, in the first worker's memory."""
        rows: list[torch.Tensor] = [
            row
            for frame, count in zip(frames, self._forest.counts, strict=True)
            for row in frame.payload.view(count, -1)
        ]
        for segment in self._rows.segments:
            self._forest.sum_in_place([segment.of(row) for row in rows])
        return rows[0]

    def _check(self, frames: Sequence[Frame]) -> None:
        first = frames[0]
        for rank, (frame, count) in enumerate(zip(frames, self._forest.counts, strict=True)):
            if frame.header.place != first.header.place:
                raise DifferError(f"rank {rank} computes gradients of another batch than rank 0")
            if frame.header.payload != count * self._rows.bytes:
                raise DifferError(f"rank {rank} holds other parameters than rank 0")
            if repr(frame.meta["groups"]) != repr(first.meta["groups"]):
                raise DifferError(f"the optimizer has other settings on rank {rank} than on rank 0")

    # --- answers ---------------------------------------------------------------------------------

    def _send_version(self, connections: Sequence[Connection]) -> None:
        """Send the parameters as they are now to all workers; some take them a few updates later."""
        memory = self._pool.take(self._row.numel())
        memory.copy_(self._row)
        lease = Lease(self._pool, memory, len(connections))
        for connection in connections:
            connection.send(
                Kind.VERSION, [memory], lease=lease, tag=self._number, number=self._version
            )

    def _send_memory(self, connection: Connection) -> None:
        assert self._optimizer is not None
        entries, tensors = optimizers.pack(self._optimizer, self._parameters)
        rows = Rows([Spec.of(tensor) for tensor in tensors])
        meta: dict[str, Any] = {"state": entries, "tensors": [spec.words() for spec in rows.specs]}
        connection.send(Kind.MEMORY, [rows.row(tensors)], number=self._version, meta=meta)


def _check_numbers(optimizer: Optimizer, given: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an optimizer that counts in its groups: the next step brings the worker's numbers again."""
    for now, words in zip(optimizers.numbers(optimizer), given, strict=True):
        changed = [name for name, value in words.items() if repr(now[name]) != repr(value)]
        if changed:
            raise ModelError(
                f"a step of {type(optimizer).__name__} changes {', '.join(changed)} of its parameter "
                "groups, which in servers no worker would learn of",
                hint="leave out the staleness: then every worker updates its own copy",
            )
