"""Sockets between ranks of one host: notices of written buffers, detection of ended ranks.

A process that dies closes its sockets, so that its peers learn of it at once; that is why signals go
through sockets rather than through flags in the shared memory itself.

Their addresses are abstract (unix(7)): they belong to the network namespace, which identifies a host, and
not to a directory that two containers on one network may not share. No permissions of a file protect such
an address, so each side asks the kernel for the user of the other.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
from dataclasses import dataclass, field

import torch.distributed as dist

from lockstep.errors import MismatchError, PeerError, RunError
from lockstep.world import host
from lockstep.world.waiting import await_any

_RANK = struct.Struct("<I")
_SIGNAL = struct.Struct("<BQQ")  # kind, number, place of the sender
WRITTEN, SUMMED = 0, 1
_SPINS = 60  # polls before a wait that gives the core away: about as long as that costs
_CONNECT_SECONDS = 1800.0  # that a slow peer may take to reach the same call
_GREETING_SECONDS = 10.0  # that a connected process may take to send its rank


@dataclass(slots=True)
class _Peer:
    rank: int
    socket: socket.socket
    latest: list[int] = field(default_factory=lambda: [0, 0])
    places: dict[int, int] = field(default_factory=dict)
    is_gone: bool = False


class PeerSockets:
    """This rank's connections to all others of its host.

    Args:
        name: what the connections are for; the same on all ranks, and used once.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._peers = self._connect_all(dist.PrefixStore(f"peers/{name}", store))
        # Where ranks share cores, a rank that looks again and again keeps the others from answering.
        self._spins = _SPINS if size <= len(os.sched_getaffinity(0)) else 0
        self._poll = select.poll()
        self._by_descriptor = {peer.socket.fileno(): peer for peer in self._peers}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def _connect_all(self, store: dist.Store) -> list[_Peer]:
        name = f"lockstep-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(_CONNECT_SECONDS)
            server.bind(f"\0{name}")
            server.listen(self.size)
            store.set(str(self.rank), name)
            peers = [self._connect(store, other) for other in range(self.rank)]
            peers += [self._accept(server) for _ in range(self.rank + 1, self.size)]
        return sorted(peers, key=lambda peer: peer.rank)

    def _connect(self, store: dist.Store, other: int) -> _Peer:
        name = _name_of(store, other)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"\0{name}")
            _check_user(connection)
            connection.send(_RANK.pack(self.rank))
        except OSError as error:
            connection.close()
            raise _unreachable(other, error) from error
        return _Peer(other, connection)

    @staticmethod
    def _accept(server: socket.socket) -> _Peer:
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                raise _absent("a rank of this host") from error
            except OSError as error:
                raise _without_files(error) from error
            try:
                _check_user(connection)
                connection.settimeout(_GREETING_SECONDS)
                (rank,) = _RANK.unpack(connection.recv(_RANK.size))
            except (OSError, struct.error):  # another user, or no rank of this run
                connection.close()
                continue
            connection.settimeout(None)
            return _Peer(rank, connection)

    def exchange_descriptors(self, descriptor: int) -> list[int]:
        """Give every peer `descriptor`, and return all ranks' in rank order; own ones are copies."""
        for peer in self._peers:
            socket.send_fds(peer.socket, [b"fd"], [descriptor])
        received = {self.rank: os.dup(descriptor)}
        for peer in self._peers:
            message, descriptors, _, _ = socket.recv_fds(peer.socket, 2, 1)
            if not message:
                raise self._gone(peer, 1)
            if not descriptors:  # the kernel has found no place for it
                error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                raise _without_files(error) from error
            received[peer.rank] = descriptors[0]
        return [received[rank] for rank in range(self.size)]

    def signal(self, kind: int, number: int, place: int = 0) -> None:
        """Send every peer that this rank has written, or summed, its `number`-th bucket, at `place`.

        Raises:
            PeerError: if a peer is gone.
        """
        message = _SIGNAL.pack(kind, number, place)
        for peer in self._peers:
            try:
                peer.socket.send(message)
            except OSError as error:
                raise self._gone(peer, number) from error

    def all_signalled(self, kind: int, number: int, *, wait: bool) -> bool:
        """Return whether every peer has written, or summed, its `number`-th bucket, counted from 1.

        Raises:
            PeerError: if a peer is gone before it has.
        """
        spins = self._spins if wait else 0
        while waiting := [peer for peer in self._peers if peer.latest[kind] < number]:
            for peer in waiting:
                if peer.is_gone:
                    raise self._gone(peer, number)
            ready = self._poll.poll(0 if spins or not wait else None)
            for descriptor, _ in ready:
                self._receive(self._by_descriptor[descriptor])
            if not ready and not wait:
                return False
            spins = max(0, spins - 1)
        return True

    def _receive(self, peer: _Peer) -> None:
        try:
            message = peer.socket.recv(_SIGNAL.size)
        except OSError:
            message = b""
        if not message:
            # It may have sent all its signals; whether a signal is missing shows when it is waited for.
            peer.is_gone = True
            self._poll.unregister(peer.socket.fileno())
            return
        kind, number, place = _SIGNAL.unpack(message)
        peer.latest[kind] = number
        if kind == WRITTEN:
            peer.places[number] = place

    def check_place(self, number: int, place: int) -> None:
        """Compare the batches in which all ranks wrote their `number`-th bucket.

        Raises:
            MismatchError: if a peer was in another batch.
        """
        for peer in self._peers:
            if peer.places.pop(number) != place:
                raise MismatchError(
                    f"rank {peer.rank} computes gradients of another batch than rank {self.rank}",
                    hint="every rank must call run.backward for every microbatch: a `continue` or a "
                    "`break` must not depend on the rank or on one rank's values; to leave out a bad one: "
                    "run.backward(loss, weight=len(x) if torch.isfinite(loss) else 0)",
                )

    def _gone(self, peer: _Peer, number: int) -> PeerError:
        return PeerError(
            f"rank {peer.rank} is gone: it closed its connection before exchange {number} was complete",
            hint=f"what happened to rank {peer.rank} is the cause; see its log",
        )

    def close(self) -> None:
        """Close the connections, which peers that still wait detect."""
        for peer in self._peers:
            peer.socket.close()


def _name_of(store: dist.Store, rank: int) -> str:
    """Return the address at which a rank listens."""
    try:
        found = await_any(store, [[str(rank)]], _CONNECT_SECONDS)
        name = None if found is None else store.get(str(rank)).decode()
    except dist.DistError as error:
        raise PeerError(
            f"the store is gone, and with it the rank that hosts it: {error}"
        ) from error
    if name is None:
        raise _absent(f"rank {rank}")
    return name


def _without_files(error: OSError) -> RunError:
    return RunError(
        f"this rank cannot open the connections to the ranks of its host: {error.strerror}",
        hint="`ulimit -n` says how many files a process may have open: two for each other rank and model",
    )


def _absent(who: str) -> PeerError:
    return PeerError(
        f"{who} did not come to the same run.model call, within {_CONNECT_SECONDS:.0f} s",
        hint="all ranks must call run.model for the same models, in the same order",
    )


def _unreachable(rank: int, error: OSError) -> PeerError:
    return PeerError(
        f"rank {rank} cannot be reached through a socket of this host: {error.strerror or error}; expected "
        "one kernel and one network namespace, since both ranks name the same boot and namespace",
        hint="exchange='tree' (--exchange tree) goes over the network; two ranks must have one user",
    )


def _check_user(connection: socket.socket) -> None:
    """Refuse a connection to a process of another user.

    Raises:
        PermissionError: if its user is another one.
    """
    _, user = host.peer(connection)
    if user != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {user}, not to {os.geteuid()}")
