"""Sockets between the ranks of one host, to signal written buckets and to detect ended ranks.

The kernel closes the sockets of a process that dies, so that the other ranks notice the death at once.
Flags in shared memory would not show a death.

The sockets have abstract addresses (unix(7)), which all processes of a network namespace can reach. Socket
files would need a common directory, which two containers on one network may not have. No file permissions
protect an abstract address, so each process asks the kernel for the user of the process at the other end.
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
    """Socket connections from this rank to all other ranks of its host.

    Args:
        name: name of the connections; the same on all ranks of the host, and used once.
        ranks: all ranks of the host, this one included.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, ranks: range) -> None:
        self.rank, self._ranks = rank, ranks
        self._peers = self._connect_all(dist.PrefixStore(f"peers/{name}", store))
        # Where ranks share cores, a rank that polls keeps the others from computing.
        self._spins = _SPINS if len(ranks) <= len(os.sched_getaffinity(0)) else 0
        self._poll = select.poll()
        self._by_descriptor = {peer.socket.fileno(): peer for peer in self._peers}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def _connect_all(self, store: dist.Store) -> list[_Peer]:
        name = f"lockstep-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.settimeout(_CONNECT_SECONDS)
            server.bind(f"\0{name}")
            server.listen(len(self._ranks))
            store.set(str(self.rank), name)
            peers = [self._connect(store, other) for other in self._ranks if other < self.rank]
            peers += [self._accept(server) for other in self._ranks if other > self.rank]
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
            raise PeerError(
                f"rank {other} cannot be reached through a socket of this host: "
                f"{error.strerror or error}; expected one kernel and one network namespace, since both "
                "ranks name the same boot and namespace",
                hint="exchange='tree' (--exchange tree) goes over the network; two ranks must have one "
                "user",
            ) from error
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
        """Send a file descriptor to all ranks of the host; return one from each rank, in rank order."""
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
        return [received[rank] for rank in self._ranks]

    def signal(self, kind: int, number: int, place: int = 0) -> None:
        """Tell all ranks of the host that this rank has written, or summed, its part of bucket `number`.

        Args:
            kind: `WRITTEN`: this rank's sums over its replicas are in shared memory. `SUMMED`: the totals
                of the elements that this rank adds are in shared memory.
            number: number of the bucket, from 1.
            place: number of the batch, which the other ranks compare with theirs.

        Raises:
            PeerError: if another rank has closed its socket.
        """
        message = _SIGNAL.pack(kind, number, place)
        for peer in self._peers:
            try:
                peer.socket.send(message)
            except OSError as error:
                raise self._gone(peer, number) from error

    def all_signalled(self, kind: int, number: int, *, wait: bool) -> bool:
        """Return whether all ranks of the host have called `signal` with `kind` for bucket `number`.

        `wait`: wait until all ranks have.

        Raises:
            PeerError: if a rank has closed its socket without that call.
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
            # No error yet: the rank may have sent all its messages before it closed the socket.
            peer.is_gone = True
            self._poll.unregister(peer.socket.fileno())
            return
        kind, number, place = _SIGNAL.unpack(message)
        peer.latest[kind] = number
        if kind == WRITTEN:
            peer.places[number] = place

    def check_place(self, number: int, place: int) -> None:
        """Check that all ranks of the host wrote bucket `number` in the same batch, `place`.

        Raises:
            MismatchError: if another rank was in another batch than `place`.
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
        """Close all sockets; other ranks that still wait for this rank raise `PeerError`."""
        for peer in self._peers:
            peer.socket.close()


def _name_of(store: dist.Store, rank: int) -> str:
    """Wait until `rank` has put the address of its socket into the store; return the address."""
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


def _check_user(connection: socket.socket) -> None:
    """Raise an error if the process at the other end of a socket belongs to another user.

    Raises:
        PermissionError: if the users differ.
    """
    _, user = host.peer(connection)
    if user != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {user}, not to {os.geteuid()}")
