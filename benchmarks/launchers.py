"""A thousand launchers and one coordinator: join, heartbeats, a launcher that dies, one that leaves.

Claims: 1,000 launchers join in less than a second; their heartbeats take less than 0.2 of a core on the
host of launcher 0; a launcher that dies is named on all others in less than 3 s, 2.5 s of which it has to
connect again; a launcher leaves, and the others have joined the next round in less than 2 s.

Measured: launcher 0 is a process with the server, the coordinator and the client of a launch. The other
launchers are connections of a second process, which send the same messages at the same intervals as
`CoordinatorClient`; both processes share this machine, over its loopback interface. `join` is the time from
the first connection until each launcher has the port of the workers' store. `heartbeats` is the processor
time of launcher 0 per second, over five intervals. Memory is what launcher 0's process has grown by,
without the kernel's buffers. `through the store` comes before all of that: launcher 0 hosts the store and
waits in `Join`, the others write their cards, read the number of the round at the interval of launchers,
and then the cards of all. Where the limit of open files is too low, a size is skipped.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import secrets
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import Report, options_parser

from lockstep.launch.nodes.client import CoordinatorClient
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.launch.nodes.coordinator import beat_seconds
from lockstep.launch.nodes.join import READS_PER_SECOND, Join
from lockstep.launch.nodes.keys import JoinEntry, RendezvousKeys
from lockstep.launch.nodes.membership import Common, Launcher, Membership
from lockstep.launch.nodes.messages import LauncherReport
from lockstep.launch.nodes.server import CoordinatorServer, ServerAddress
from lockstep.world.rendezvous.membership_check import NodeInfo
from lockstep.world.rendezvous.store import connect_store, host_store
from lockstep.world.waiting import go_on

#: Limits of the claims, for 1,000 launchers.
CLAIMS = {"join, s": 1.0, "heartbeats, cores": 0.2, "dead one named, s": 3.0, "leaves, s": 2.0}
MEMORY = "memory, KB per launcher"
_PORT = 4242
_BEATS = 5
#: Connections to the store, which launchers of this process share.
_CLIENTS = 16
_SECONDS = 120.0


def launcher_0(count: int, pipe: Connection) -> None:
    """Be launcher 0: serve three rounds, of all launchers and without one and two of them."""
    server = CoordinatorServer(loopback=True)
    pipe.send(server.address)
    for number in (1, 2, 3):
        pipe.recv()
        launchers = count + 1 - number
        before = _memory()
        client = CoordinatorClient(_membership(launchers), server, number=number, least=1)
        client.enter(0, lambda: _PORT, go_on)
        pipe.send(None)
        if number == 1:
            pipe.recv()
            began, used = time.monotonic(), time.process_time()
            time.sleep(_BEATS * beat_seconds(count))
            cores = (time.process_time() - used) / (time.monotonic() - began)
            pipe.send((cores, (_memory() - before) / count / 1024))
        while (decision := client.decision) is None or not decision.is_last:
            time.sleep(0.02)
        pipe.send(decision)
        client.close()


def _memory() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def _membership(count: int) -> Membership:
    return Membership(
        index=0,
        ranks=(8,) * count,
        nodes=tuple(range(count)),
        names=tuple(f"node {index} (host{index})" for index in range(count)),
        address="127.0.0.1",
        interface=None,
    )


class Launchers:
    """Connections of all launchers but the first to launcher 0, which report as launchers do.

    Attributes:
        answers: the last answer to each launcher.
    """

    def __init__(self, address: ServerAddress, number: int, count: int) -> None:
        self._address, self._number, self._beat = address, number, beat_seconds(count)
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[int, socket.socket] = {}
        self._rest: dict[int, bytes] = dict.fromkeys(range(1, count), b"")
        self._due: dict[int, float] = {}
        self._reports = {
            index: LauncherReport(index=index, round=number, generation=0)
            for index in range(1, count)
        }
        self.answers: dict[int, Any] = {}
        for index in self._reports:
            self.report(index)

    def report(self, index: int, **changes: Any) -> None:
        """Send the report of a launcher, and the next one an interval later; connect first if need be."""
        if index not in self._sockets:
            self._sockets[index] = socket.create_connection(("127.0.0.1", self._address.port))
            self._sockets[index].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(self._sockets[index], selectors.EVENT_READ, index)
        message = {"token": self._address.token, "report": asdict(self._reports[index]) | changes}
        self._sockets[index].sendall(json.dumps(message).encode() + b"\n")
        self._due.pop(index, None)  # the next report is the last one that is due
        self._due[index] = time.monotonic() + self._beat

    def until(self, condition: Callable[[], bool]) -> float:
        """Report and receive answers until a condition holds; return the time then."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            now = time.monotonic()
            assert now < deadline, f"not all launchers had an answer within {_SECONDS} s"
            for index, due in tuple(self._due.items()):
                if due > now:
                    break
                self.report(index)
            for key, _ in self._selector.select(0.005):
                self._receive(key.data)
        return time.monotonic()

    def _receive(self, index: int) -> None:
        data = self._sockets[index].recv(1 << 16)
        if not data:  # launcher 0 had no room for a connection without a token
            self.hang_up(index)
            self.report(index)
            return
        *lines, self._rest[index] = (self._rest[index] + data).split(b"\n")
        if lines:
            self.answers[index] = json.loads(lines[-1])

    def hang_up(self, index: int) -> None:
        """Close the connection of a launcher, which then sends no reports."""
        self._due.pop(index, None)
        connection = self._sockets.pop(index)
        self._selector.unregister(connection)
        connection.close()
        self._rest[index] = b""

    def all_have(self, indices: Iterable[int], field: str) -> Callable[[], bool]:
        """Return a function that tells whether these launchers have a port, or a decision."""
        left = set(indices)

        def done() -> bool:
            left.difference_update(
                [index for index in left if self.answers.get(index, {}).get(field)]
            )
            return not left

        return done

    def end(self) -> None:
        """Report that the last decision was received, and leave the round."""
        for index in tuple(self._sockets):
            self.report(index, heard=True)
        for index in tuple(self._sockets):
            self._sockets[index].recv(1 << 16)  # the answer
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for index in tuple(self._sockets):
            self.hang_up(index)
        self._selector.close()


def join(address: ServerAddress, pipe: Connection, number: int, count: int) -> Launchers:
    """Let launchers join a round, until each has the port of the workers' store."""
    pipe.send(None)
    launchers = Launchers(address, number, count)
    launchers.until(launchers.all_have(range(1, count), "port"))
    pipe.recv()
    return launchers


def measure(count: int) -> dict[str, float]:
    """Measure one launch of `count` launchers."""
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=launcher_0, args=(count, other))
    process.start()
    address = pipe.recv()
    found = {"through the store, s": meet(count)}
    began = time.monotonic()
    launchers = join(address, pipe, 1, count)
    found["join, s"] = time.monotonic() - began

    pipe.send(None)
    launchers.until(pipe.poll)
    found["heartbeats, cores"], found[MEMORY] = pipe.recv()

    dead = count // 2
    others = [index for index in range(1, count) if index != dead]
    began = time.monotonic()
    launchers.hang_up(dead)
    found["dead one named, s"] = launchers.until(launchers.all_have(others, "decision")) - began
    for index in others:
        assert f"node {dead} " in launchers.answers[index]["decision"]["text"]
    launchers.end()
    assert pipe.recv().kind == "round"

    launchers = join(address, pipe, 2, count - 1)
    leaving = count // 3
    others = [index for index in range(1, count - 1) if index != leaving]
    began = time.monotonic()
    launchers.report(leaving, leaves="stopped")
    launchers.until(launchers.all_have(others, "decision"))
    launchers.end()
    assert pipe.recv().text == "stopped"
    launchers = join(address, pipe, 3, count - 2)
    found["leaves, s"] = time.monotonic() - began

    process.terminate()
    process.join()
    launchers.close()
    return found


def host(count: int, pipe: Connection) -> None:
    """Host the store in which launchers find each other, and start the first round."""
    store = host_store(0, loopback=True)
    pipe.send(store.port)
    keys = RendezvousKeys(store, go_on)
    config = RendezvousConfig(
        name="benchmark", count=count, index=0, address="127.0.0.1", source=""
    )
    own = _card(0, NodeInfo.here(0))
    Join(keys, 1, own, (), may_close=True, config=config, hint=str).wait()
    pipe.recv()


def _card(index: int, node: NodeInfo) -> JoinEntry:
    return JoinEntry(
        token=secrets.token_hex(8),
        node=node,
        launcher=Launcher(ranks=8, name=f"host{index}", cpus=tuple(range(64))),
        common=Common.new(8),
        address=ServerAddress(port=_PORT, token=secrets.token_hex(16), addresses=("10.0.0.1",)),
        round=0,
        index=index,
        generation=0,
    )


def meet(count: int) -> float:
    """Return the seconds until all launchers have joined the first round through the store."""
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=host, args=(count, other))
    process.start()
    port = pipe.recv()
    clients = [connect_store("127.0.0.1", port) for _ in range(_CLIENTS)]
    launchers = [RendezvousKeys(clients[index % _CLIENTS], go_on) for index in range(count)]
    node = NodeInfo.here(0)
    cards = [_card(index, node) for index in range(count)]
    began = time.monotonic()
    for index in range(1, count):
        launchers[index].arrive(1, cards[index])
    for keys in launchers[1:]:
        while keys.newest_number < 1:
            time.sleep(1 / READS_PER_SECOND)
        _, key = json.loads(keys.store.get("newest"))
        keys.store.get(key)
    seconds = time.monotonic() - began
    assert len(launchers[-1].newest()[1]) == count
    pipe.send(None)
    process.join()
    return seconds


def too_few_files(count: int) -> str | None:
    """Raise the limit of open files; return why `count` launchers cannot be had, or `None`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 200
    if hard != resource.RLIM_INFINITY and hard < needed:
        return f"skipped: at most {hard} open files, {needed} are needed (ulimit -Hn)"
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


def judge(name: str, values: list[float]) -> str:
    """Return a line that says whether a claim holds."""
    middle, most = statistics.median(values), CLAIMS[name]
    return f"{name}: {middle:.3f}; claim: less than {most}: {'holds' if middle < most else 'does not hold'}"


def main() -> None:
    parser = options_parser(__doc__, pairs=5)
    parser.add_argument("--sizes", default="100,1000,3000,10000", help="numbers of launchers")
    options = parser.parse_args()
    report = Report("A thousand launchers", options.json)
    rows: list[list[str]] = []
    notes: list[str] = []
    for count in map(int, options.sizes.split(",")):
        if (reason := too_few_files(count)) is not None:
            notes.append(f"{count:,} launchers: {reason}")
            continue
        rounds = options.pairs if count <= 1000 else min(options.pairs, 3)
        found = [measure(count) for _ in range(rounds)]
        values = {name: [one[name] for one in found] for name in found[0]}
        print(f"{count}: {values}", file=sys.stderr, flush=True)
        for name, each in values.items():
            ends = f"{min(each):.3f} to {max(each):.3f}"
            rows.append([f"{count:,}", name, f"{statistics.median(each):.3f}", ends, str(rounds)])
        if count == 1000:
            notes += [judge(name, values[name]) for name in CLAIMS]
    report.table(
        "launchers and their coordinator",
        ["launchers", "measured", "median", "min to max", "rounds"],
        rows,
        notes,
    )
    report.close()


if __name__ == "__main__":
    main()
