"""A worker's connections to the servers of its launch: it speaks, waits for answers, and counts bytes."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import ModelError, PeerError, RunError
from lockstep.exchange.base import Forest
from lockstep.exchange.frames import HEADER, LONGEST_META, Header, Kind, frame, parse, view
from lockstep.world import servers
from lockstep.world.servers import Place

#: The most pieces that one call of the system takes (IOV_MAX).
_PIECES = 512
#: How long a server may take to hear a farewell.
_FAREWELL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server has said, but for tensors that the caller had a place for.

    Attributes:
        header: the fixed part.
        meta: its JSON.
        payload: its bytes, where the caller had no place for them.
    """

    header: Header
    meta: dict[str, Any]
    payload: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Box:
    """Versions of one optimizer's parameters: they may come while something else is waited for.

    Attributes:
        place: makes memory for one.
        arrived: those that were read, the oldest first.
    """

    place: Callable[[], torch.Tensor]
    arrived: deque[torch.Tensor]


class Link:
    """A connection to one server.

    Args:
        connection: to it; closed by `close`.
        index: number of the server.

    Attributes:
        name: what the server is called.
        sent: bytes that went to it.
        received: bytes that came from it.
    """

    def __init__(self, connection: socket.socket, index: int) -> None:
        self._socket = connection
        self.name = f"server {index}"
        self.sent = self.received = 0
        self._boxes: dict[int, _Box] = {}
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A node that is lost closes no connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, kind: Kind, tensors: Sequence[torch.Tensor] = (), **fields: Any) -> None:
        """Send a frame; see `frames.frame` for its fields.

        Raises:
            PeerError: if the server is gone.
        """
        views = deque(frame(kind, tensors, **fields))
        self.sent += sum(one.nbytes for one in views)
        try:
            while views:
                done = self._socket.sendmsg([views[i] for i in range(min(len(views), _PIECES))])
                _drop(views, done)
        except OSError as error:
            raise self._last_words() from error

    def receive(self, kind: Kind, into: Sequence[torch.Tensor] = ()) -> Answer:
        """Wait for a frame of one kind.

        Args:
            kind: what is expected; what else a server says is an error.
            into: where its tensors go, if it sends some; they have the sizes that it says.

        Raises:
            PeerError: if the server is gone, or another worker.
            ModelError: if it cannot do what is asked for.
        """
        header, meta = self._next()
        while header.kind == Kind.VERSION:
            self._take_version(header)
            header, meta = self._next()
        if header.kind != kind:
            raise self.strange(f"answered with kind {header.kind}; expected {kind} ({kind.name})")
        rest = torch.empty(0, dtype=torch.uint8)
        if not header.payload:
            return Answer(header, meta, rest)
        if not into:
            rest = self._room_for(header.payload)
            into = [rest]
        expected = sum(view(one).nbytes for one in into)
        if expected != header.payload:
            raise self.strange(f"sends {header.payload} bytes; expected {expected}")
        for one in into:
            self._fill(view(one))
        return Answer(header, meta, rest)

    def expect(self, tag: int, place: Callable[[], torch.Tensor]) -> None:
        """Take versions of the parameters of optimizer `tag` from now on, into what `place` returns."""
        self._boxes[tag] = _Box(place, deque())

    def version(self, tag: int) -> torch.Tensor:
        """Wait for the next version of the parameters of optimizer `tag`, and return it.

        Raises:
            PeerError: if the server is gone, or another worker.
            ModelError: if it cannot do what was asked for.
        """
        box = self._boxes[tag]
        while not box.arrived:
            header, _ = self._next()
            if header.kind != Kind.VERSION:
                raise self.strange(f"sends kind {header.kind}; expected a version of parameters")
            self._take_version(header)
        return box.arrived.popleft()

    def _take_version(self, header: Header) -> None:
        box = self._boxes.get(header.tag)
        memory = torch.empty(0, dtype=torch.uint8) if box is None else box.place()
        if box is None or header.payload != memory.nbytes:
            raise self.strange(
                f"sends {header.payload} bytes of parameters of optimizer {header.tag}; expected "
                f"{memory.nbytes}"
            )
        self._fill(view(memory))
        box.arrived.append(memory)

    def _next(self) -> tuple[Header, dict[str, Any]]:
        """Read what comes before the next frame's tensors.

        Raises:
            PeerError: if the server is gone, or another worker.
            ModelError: if it cannot do what it was asked for.
        """
        header, meta = self._head()
        self.received += header.size
        if header.kind == Kind.ERROR:
            raise _complaint(meta)
        return header, meta

    def _head(self) -> tuple[Header, dict[str, Any]]:
        """Read what comes before a frame's tensors."""
        header = Header.unpack(self._take(HEADER.size))
        if header.meta > LONGEST_META:
            raise self.strange(
                f"sends {header.meta} bytes of JSON; expected {LONGEST_META} at most"
            )
        try:
            return header, parse(self._take(header.meta))
        except (ValueError, RecursionError) as error:
            raise self.strange(f"sends JSON that is none: {error}") from error

    def _room_for(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8)
        except (RuntimeError, TypeError) as error:
            raise self.strange(f"sends {size} bytes, for which there is no memory") from error

    def strange(self, what: str) -> PeerError:
        """Return what to raise where a server says what no server says."""
        return PeerError(
            f"{self.name} {what}",
            hint="are its node and this one at the same version of Lockstep?",
        )

    def _take(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, place: memoryview) -> None:
        while place:
            try:
                count = self._socket.recv_into(place)
            except OSError as error:
                raise self._gone() from error
            if not count:
                raise self._gone()
            place = place[count:]

    def _last_words(self) -> RunError:
        """Return why a server took nothing more: what it has said before it went, if anything."""
        try:
            while True:
                header, meta = self._head()
                if header.kind == Kind.ERROR:
                    return _complaint(meta)
                self._fill(view(self._room_for(header.payload)))
        except PeerError as gone:
            return gone

    def _gone(self) -> PeerError:
        return PeerError(
            f"{self.name} is gone: it closed its connection before the run was over",
            hint=f"what happened to {self.name} is the cause; see its log",
        )

    def leave(self) -> None:
        """Say farewell, if the server still listens, and close the connection."""
        self._socket.settimeout(_FAREWELL_SECONDS)
        with contextlib.suppress(PeerError):  # who is gone needs no farewell
            self.send(Kind.BYE)
        self._socket.close()


class Links:
    """Connections to all servers, for one model.

    Args:
        links: one to each server, in order.
        leads: whether this is the rank that speaks for all.
        tells: whether it tells the user, for all models, what the servers have moved.
        release: called when the servers are left.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        leads: bool,
        tells: bool = False,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.links = tuple(links)
        self.leads, self.tells = leads, tells
        self._release = release

    @property
    def sent(self) -> int:
        """Bytes that went to servers."""
        return sum(link.sent for link in self.links)

    @property
    def received(self) -> int:
        """Bytes that came from servers."""
        return sum(link.received for link in self.links)

    def counts(self) -> list[str]:
        """Return a line for each server: what it has moved for all workers so far."""
        lines = []
        for link in self.links:
            link.send(Kind.COUNT)
            moved = link.receive(Kind.COUNT).meta
            lines.append(f"{link.name}: {megabytes(moved['in'])} in, {megabytes(moved['out'])} out")
        return lines

    def close(self) -> None:
        """Leave the servers."""
        for link in self.links:
            link.leave()
        if self._release is not None:
            self._release()


def connect(
    where: tuple[Sequence[Place], str],
    forest: Forest,
    replicas: int,
    store: dist.Store,
    key: str,
    threads: int,
    *,
    tells: bool,
    release: Callable[[], None] | None = None,
) -> Links:
    """Return new connections to the servers of the run; all ranks connect.

    Args:
        where: the servers' places, and the secret that they know.
        forest: the ranks' tree nodes.
        replicas: number of replicas in all.
        store: where ranks leave notes for each other.
        key: what the connections are for; used once per run.
        threads: intra-op threads of each rank.
        tells: whether it is the first model of the run that has connections.
        release: called when the servers are left.

    Raises:
        PeerError: if a server is gone.
    """
    if forest.rank == 0:
        store.set(f"servers/{key}", uuid.uuid4().hex)
    room = store.get(f"servers/{key}").decode()
    me = {"room": room, "rank": forest.rank, "size": forest.size, "replicas": replicas}
    places, token = where
    links = []
    for index, place in enumerate(places):
        link = Link(servers.connect(place, f"server {index}"), index)
        greet(link, token, {"threads": threads, **me})
        links.append(link)
    leads = forest.rank == 0
    return Links(links, leads=leads, tells=leads and tells, release=release)


def greet(link: Link, token: str, me: Mapping[str, Any]) -> None:
    """Show a server that this worker belongs to its launch, and have it show the same.

    Args:
        link: a new connection to it.
        token: what both know; whoever listens there instead does not learn it.
        me: who this worker is.

    Raises:
        PeerError: if what listens there is no server of this launch.
    """
    nonces = (str(link.receive(Kind.CHALLENGE).meta.get("nonce")), secrets.token_hex(16))
    shown = servers.proof(token, "worker", nonces)
    link.send(Kind.HELLO, meta={**me, "nonce": nonces[1], "proof": shown})
    answer = str(link.receive(Kind.WELCOME).meta.get("proof"))
    if not hmac.compare_digest(answer.encode(), servers.proof(token, "server", nonces).encode()):
        raise link.strange("does not know the secret of this launch")


def _complaint(meta: Mapping[str, Any]) -> RunError:
    """Return what a server has against going on: another worker, or what it was asked to do."""
    kind = ModelError if meta.get("kind") == "model" else PeerError
    return kind(str(meta.get("message")), hint=meta.get("hint"))


def megabytes(count: int) -> str:
    """Return a number of bytes as people read it."""
    return f"{count / 1e6:.1f} MB"


def _drop(views: deque[memoryview], count: int) -> None:
    """Drop the first `count` bytes."""
    while count:
        first = views.popleft()
        if count < first.nbytes:
            views.appendleft(first[count:])
            return
        count -= first.nbytes
