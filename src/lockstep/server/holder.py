"""Parameters that a server holds, and their optimizer: one update per global batch.

Update `t` is made of the gradients of batch `t` of all workers, as soon as all are there. A worker that
has sent its own may go on with parameters that are a few updates behind; it says how many.
"""

from __future__ import annotations

from collections import defaultdict
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
class _Wish:
    """A worker that waits for parameters, or for the optimizer's state.

    Attributes:
        connection: the worker.
        kind: what it waits for.
        life: which life of the parameters it means.
        least: how many updates they must have.
        has: how many those have that it knows.
    """

    connection: Connection
    kind: Kind
    life: int
    least: int
    has: int


class _Image:
    """The parameters as they were after an update, for as long as somebody is still being sent them."""

    def __init__(self, pool: Pool, row: torch.Tensor) -> None:
        self._pool = pool
        self.memory = pool.take(row.numel())
        self.memory.copy_(row)
        self._readers = 1  # the holder's own interest

    def lease(self) -> Lease:
        """Return a lease of one more reader."""
        self._readers += 1
        return Lease(self, self.memory, 1)

    def give(self, _memory: torch.Tensor) -> None:
        """One reader less."""
        self.drop()

    def drop(self) -> None:
        """Lose one interest in it."""
        self._readers -= 1
        if not self._readers:
            self._pool.give(self.memory)


class Holder:
    """The parameters of one optimizer that are this server's.

    They may begin anew, with other values, when workers have loaded some: each beginning is a *life*, which
    all workers count alike.

    Args:
        forest: the workers' tree nodes.
        pool: where memory comes from.
    """

    def __init__(self, forest: Forest, pool: Pool) -> None:
        self._forest, self._pool = forest, pool
        self._life = self._version = 0
        self._rows = Rows([])
        self._row = torch.empty(0, dtype=torch.uint8)
        self._parameters: list[torch.nn.Parameter] = []
        self._optimizer: Optimizer | None = None
        self._image: _Image | None = None
        self._frames: dict[tuple[int, int], dict[int, Frame]] = defaultdict(dict)
        self._wishes: list[_Wish] = []

    @property
    def waits(self) -> bool:
        """Whether a worker waits for another one."""
        return bool(self._wishes)

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
        self._optimizer = made
        self._life, self._version = frame.header.place, frame.header.number
        self._frames = defaultdict(
            dict, {key: frames for key, frames in self._frames.items() if self._is_due(*key)}
        )
        self._moved()
        self._advance()

    def update(self, connection: Connection, frame: Frame) -> None:
        """Take one worker's gradients of a batch.

        Raises:
            DifferError: if workers do not mean the same batch, or the same update.
        """
        life, number = int(frame.meta["life"]), frame.header.number
        if self._is_due(life, number):
            self._frames[life, number][connection.rank] = frame
        self.wish(connection, Kind.PARAMETERS, frame)

    def wish(self, connection: Connection, kind: Kind, frame: Frame) -> None:
        """Answer a worker when what it needs is there."""
        meta = frame.meta
        life, least, has = int(meta["life"]), int(meta["least"]), int(meta["has"])
        self._wishes.append(_Wish(connection, kind, life, least, has))
        self._advance()

    def forget(self, connection: Connection) -> None:
        """A worker is gone: it needs no answer."""
        self._wishes = [wish for wish in self._wishes if wish.connection is not connection]

    def _is_due(self, life: int, number: int) -> bool:
        return life > self._life or (life == self._life and number > self._version)

    # --- updates ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._optimizer is not None:
            frames = self._frames.get((self._life, self._version + 1), {})
            if len(frames) < self._forest.size:
                break
            del self._frames[self._life, self._version + 1]
            self._apply(self._optimizer, [frames[rank] for rank in range(self._forest.size)])
        self._answer()

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
        self._moved()

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

    def _moved(self) -> None:
        """The parameters are others now."""
        if self._image is not None:
            self._image.drop()
            self._image = None

    def _answer(self) -> None:
        """Answer those whose wish can be fulfilled."""
        ready = [wish for wish in self._wishes if self._fulfils(wish)]
        self._wishes = [wish for wish in self._wishes if not self._fulfils(wish)]
        for wish in ready:
            if wish.kind == Kind.MEMORY:
                self._send_memory(wish.connection)
            elif wish.has == self._version and wish.life == self._life:
                wish.connection.send(Kind.PARAMETERS, number=self._version)
            else:
                self._send_parameters(wish.connection)

    def _fulfils(self, wish: _Wish) -> bool:
        # Who means an earlier life is about to learn of this one, and to begin from its own values.
        return wish.life < self._life or (
            wish.life == self._life and self._optimizer is not None and wish.least <= self._version
        )

    def _send_parameters(self, connection: Connection) -> None:
        if self._image is None:
            self._image = _Image(self._pool, self._row)
        lease = self._image.lease()
        connection.send(Kind.PARAMETERS, [self._image.memory], lease=lease, number=self._version)

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
