"""A room: the workers that train one model together, and what they have with this server."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ModelError
from lockstep.exchange.base import Forest
from lockstep.exchange.frames import Kind
from lockstep.server.connection import BrokenError, Connection, Frame
from lockstep.server.holder import Holder
from lockstep.server.memory import Pool
from lockstep.server.sums import DifferError, Sums

_BATCH_HINT = (
    "every rank must call run.backward for every microbatch: a `continue` or a `break` must not depend "
    "on the rank or on one rank's values"
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the workers of a room cannot go on.

    Attributes:
        message: what was seen.
        hint: what to do about it.
        kind: `peer` where another worker is the cause, `model` where it is what they ask for.
    """

    message: str
    hint: str | None
    kind: str = "peer"

    def tell(self, connection: Connection) -> None:
        """Tell a worker."""
        connection.complain(self.message, self.hint, kind=self.kind)


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
        self._forest, self._pool = Forest.of(replicas, size, 0), pool
        self._sums = Sums(self._forest, pool)
        self._holders: dict[int, Holder] = {}
        self._departure: Trouble | None = None  # what is said of the last one who went
        self._trouble: Trouble | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left."""
        return not self._members

    def enter(self, connection: Connection, proof: str) -> None:
        """Let a worker in, and show it that it has come to the right place."""
        self._members[connection.rank] = connection
        connection.send(Kind.WELCOME, meta={"proof": proof})
        if self._trouble is not None:
            self._trouble.tell(connection)

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
        else:
            self._try(connection, frame)

    def _try(self, connection: Connection, frame: Frame) -> None:
        """Do what a worker asks for; where that cannot be, nobody can go on."""
        try:
            self._serve(connection, frame)
            self._look_around()
        except DifferError as error:
            self._fail(Trouble(str(error), _BATCH_HINT))
        except ModelError as error:
            self._fail(Trouble(error.message, error.hint, kind="model"))
        except BrokenError:
            raise
        except Exception as error:  # what an optimizer's step may raise is known to nobody
            what = f"{type(error).__name__}: {error}"
            self._fail(Trouble(f"the update failed in a server: {what}", None, kind="model"))

    def _serve(self, connection: Connection, frame: Frame) -> None:
        kind = frame.header.kind
        if kind == Kind.PUSH:
            self._sums.push(connection, frame)
            return
        tag = frame.header.tag
        holder = self._holders.setdefault(tag, Holder(tag, self._forest, self._pool))
        if kind == Kind.BEGIN:
            holder.begin(frame)
        elif kind == Kind.UPDATE:
            holder.update(connection, frame)
        elif kind == Kind.MEMORY:
            holder.ask(connection, frame)
        else:
            raise BrokenError("it asks for what servers don't do")

    def leave(self, connection: Connection) -> None:
        """A worker's connection has ended: those who wait for it never get their sums."""
        self._members.pop(connection.rank, None)
        for holder in self._holders.values():
            holder.forget(connection)
        how = "left the run" if connection.has_left else "is gone: it closed its connection"
        hint = f"what happened to rank {connection.rank} is the cause; see its log"
        self._departure = Trouble(f"rank {connection.rank} {how} before the others were done", hint)
        if connection.has_left:
            self._look_around()
        else:
            self._fail(self._departure)

    def _look_around(self) -> None:
        """See whether somebody waits for one who will not come any more."""
        waits = self._sums.waits or any(holder.waits for holder in self._holders.values())
        if waits and self._departure is not None:
            self._fail(self._departure)

    def _fail(self, trouble: Trouble) -> None:
        if self._trouble is None:
            self._trouble = trouble
            for member in self._members.values():
                trouble.tell(member)
