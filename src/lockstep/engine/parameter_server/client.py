"""Connections of a worker to the parameter servers: requests, responses, and counts of bytes."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.engine.parameter_server.discovery import proof
from lockstep.engine.parameter_server.messages import (
    HEADER,
    PIECES,
    Header,
    Kind,
    Message,
    megabytes,
    parse,
    pieces,
    view,
)
from lockstep.errors import MismatchError, ModelError, PeerError, RunError

#: Errors that a worker raises, by the kind that a server's message names; `PeerError` for other kinds.
FAILURES: dict[str, type[RunError]] = {"mismatch": MismatchError, "model": ModelError}
#: Seconds that a server may take to read a worker's last message.
_BYE_SECONDS = 1.0


class Client:
    """A worker's connection to one server.

    Methods that send or receive raise a `PeerError` if the server or another worker has ended, a
    `ModelError` if the server cannot do the requested operation, and a `MismatchError` if workers have sent
    different batches or settings.
    """

    def __init__(self, connection: socket.socket, index: int) -> None:
        self._socket = connection
        self.name = f"server {index}"
        self.sent = self.received = 0
        self._memory: dict[int, Callable[[], torch.Tensor]] = {}
        self._versions: dict[int, deque[torch.Tensor]] = {}
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # To detect a lost node, which does not close its connections.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def authenticate(self, token: str, worker: Mapping[str, Any]) -> None:
        """Prove to the server that this worker has the launch's secret, and check the server's proof.

        Args:
            token: the secret of the launch, which is not sent.
            worker: model, rank, size, replicas and threads of the worker, for the server.

        Raises:
            PeerError: if the server has another secret.
        """
        nonces = str(self.receive(Kind.CHALLENGE).meta.get("nonce")), secrets.token_hex(16)
        meta = {**worker, "nonce": nonces[1], "proof": proof(token, "worker", nonces)}
        self.send(Kind.HELLO, meta=meta)
        answer = str(self.receive(Kind.WELCOME).meta.get("proof")).encode(errors="replace")
        if not hmac.compare_digest(answer, proof(token, "server", nonces).encode()):
            raise self.strange("does not know the secret of this launch")

    def send(self, kind: Kind, tensors: Sequence[torch.Tensor] = (), **fields: Any) -> None:
        """Send a message with `tensors`; wait until it is handed to the operating system.

        `fields`: other arguments of `messages.pieces`.
        """
        views = deque(pieces(kind, tensors, **fields))
        self.sent += sum(one.nbytes for one in views)
        try:
            while views:
                done = self._socket.sendmsg([views[i] for i in range(min(len(views), PIECES))])
                while views and done >= views[0].nbytes:
                    done -= views.popleft().nbytes
                if done:
                    views[0] = views[0][done:]
        except OSError as error:
            raise self._last_error() from error

    def receive(self, kind: Kind, into: torch.Tensor | None = None) -> Message:
        """Wait for a message of this kind, and return it; store `VERSION` messages that precede it.

        `into`: memory for the message's tensor; by default new memory.
        """
        header, meta = self._next()
        while header.kind == Kind.VERSION:
            self._take_version(header)
            header, meta = self._next()
        if header.kind != kind:
            raise self.strange(f"answers with kind {header.kind}; expected {kind} ({kind.name})")
        payload = torch.empty(header.payload, dtype=torch.uint8) if into is None else into
        self._fill_payload(header, payload)
        return Message(header, meta, payload)

    def expect(self, tag: int, memory: Callable[[], torch.Tensor]) -> None:
        """Prepare to receive new versions of the parameters of an optimizer from the server.

        Args:
            tag: number of the optimizer.
            memory: function that returns a tensor of bytes for one version of the parameters.
        """
        self._memory[tag], self._versions[tag] = memory, deque()

    def version(self, tag: int) -> torch.Tensor:
        """Wait for the next version of the parameters of optimizer `tag`, and return it."""
        while not self._versions[tag]:
            header, _ = self._next()
            if header.kind != Kind.VERSION:
                raise self.strange(f"sends kind {header.kind}; expected a version of parameters")
            self._take_version(header)
        return self._versions[tag].popleft()

    def _take_version(self, header: Header) -> None:
        memory = self._memory[header.tag]()
        self._fill_payload(header, memory)
        self._versions[header.tag].append(memory)

    def _fill_payload(self, header: Header, memory: torch.Tensor) -> None:
        if header.payload != memory.nbytes:
            raise self.strange(f"sends {header.payload} bytes; expected {memory.nbytes}")
        self._fill(view(memory))

    def _next(self) -> tuple[Header, dict[str, Any]]:
        """Receive and return the header and the JSON of the next message; its tensors are not read.

        An error message of the server is raised as an exception.
        """
        head = bytearray(HEADER.size)
        self._fill(memoryview(head))
        header = Header.unpack(head)
        text = bytearray(header.meta)
        self._fill(memoryview(text))
        self.received += HEADER.size + header.meta + header.payload
        try:
            meta = parse(text)
        except (ValueError, RecursionError) as error:
            raise self.strange(f"sends JSON that is none: {error}") from error
        if header.kind == Kind.ERROR:
            kind = FAILURES.get(str(meta.get("kind")), PeerError)
            raise kind(str(meta.get("message")), hint=meta.get("hint"))
        return header, meta

    def _fill(self, memory: memoryview) -> None:
        while memory:
            try:
                count = self._socket.recv_into(memory)
            except OSError as error:
                raise self._gone() from error
            if not count:
                raise self._gone()
            memory = memory[count:]

    def _last_error(self) -> RunError:
        """Read until the connection ends; return the server's error, or else a `PeerError`."""
        try:
            while True:
                header, _ = self._next()
                self._fill(view(torch.empty(header.payload, dtype=torch.uint8)))
        except RunError as error:
            return error

    def strange(self, what: str) -> PeerError:
        """Return a `PeerError` for an unexpected message; `what` follows the server's name."""
        hint = "are its node and this one at the same version of Lockstep?"
        return PeerError(f"{self.name} {what}", hint=hint)

    def _gone(self) -> PeerError:
        return PeerError(
            f"{self.name} is gone: it closed its connection before the run was over",
            hint=f"what happened to {self.name} is the cause; see its log",
        )

    def close(self) -> None:
        """Send the server a last message, unless it has ended, and close the connection."""
        self._socket.settimeout(_BYE_SECONDS)
        with contextlib.suppress(RunError):  # the server has ended
            self.send(Kind.BYE)
        self._socket.close()


class Clients:
    """A worker's connections to all parameter servers, for one model.

    Args:
        leads: whether this is rank 0, which sends initial parameters.
        say: function that prints each server's traffic at the end; `None` if another rank or model does.
        release: function that is called once the connections are closed.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        leads: bool,
        say: Callable[[str], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.all, self.leads = clients, leads
        self._say, self._release = say, release

    @property
    def moved(self) -> dict[str, int]:
        """Numbers of bytes that this worker has `sent` to servers and `received` from them."""
        return {
            "sent": sum(client.sent for client in self.all),
            "received": sum(client.received for client in self.all),
        }

    def ends(self) -> dict[str, int]:
        """Print each server's traffic with all workers, if it is to be printed here; return `moved`."""
        if self._say is not None:
            for client in self.all:
                client.send(Kind.TRAFFIC)
                moved = client.receive(Kind.TRAFFIC).meta
                into, out = megabytes(moved["in"]), megabytes(moved["out"])
                self._say(f"lockstep: {client.name}: {into} in, {out} out")
        return self.moved

    def close(self) -> None:
        """Close the connections to all servers."""
        for client in self.all:
            client.close()
        if self._release is not None:
            self._release()
