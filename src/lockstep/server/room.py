"""A room: the workers that train one model together, and what they have with this server."""

from __future__ import annotations

from lockstep.exchange.base import Forest
from lockstep.exchange.frames import Kind
from lockstep.server.connection import BrokenError, Connection, Frame
from lockstep.server.memory import Pool
from lockstep.server.sums import DifferError, Sums

_BATCH_HINT = (
    "every rank must call run.backward for every microbatch: a `continue` or a `break` must not depend "
    "on the rank or on one rank's values"
)


class Room:
    """The workers of one model.

    Args:
        size: number of workers.
        replicas: number of replicas in all.
        pool: memory.
    """

    def __init__(self, size: int, replicas: int, pool: Pool) -> None:
        self.size, self.replicas = size, replicas
        self._members: dict[int, Connection] = {}
        self._sums = Sums(Forest.of(replicas, size, 0), pool)
        self._trouble: tuple[str, str | None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left."""
        return not self._members

    def enter(self, connection: Connection) -> None:
        """Let a worker in."""
        self._members[connection.rank] = connection
        connection.send(Kind.WELCOME)
        if self._trouble is not None:
            connection.complain(*self._trouble)

    def hear(self, connection: Connection, frame: Frame) -> None:
        """Do what a worker asks for.

        Raises:
            BrokenError: if no worker asks for this.
        """
        kind = frame.header.kind
        if kind == Kind.BYE:
            connection.has_left = True
        elif self._trouble is not None:
            return  # it has been told
        elif kind == Kind.PUSH:
            try:
                self._sums.push(connection, frame)
            except DifferError as error:
                self._fail(str(error), _BATCH_HINT)
        else:
            raise BrokenError("it asks for what servers don't do")

    def leave(self, connection: Connection) -> None:
        """A worker's connection has ended: those who wait for it never get their sums."""
        self._members.pop(connection.rank, None)
        rank = connection.rank
        if connection.has_left and not self._sums.waits:
            return
        what = "left the run" if connection.has_left else "is gone: it closed its connection"
        hint = f"what happened to rank {rank} is the cause; see its log"
        self._fail(f"rank {rank} {what} before the others were done", hint)

    def _fail(self, message: str, hint: str | None) -> None:
        if self._trouble is None:
            self._trouble = (message, hint)
            for member in self._members.values():
                member.complain(message, hint)
