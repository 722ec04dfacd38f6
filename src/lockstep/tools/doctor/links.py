"""Measure bandwidth and latency between every two nodes, in bounded time.

A node measures with only one other node at a time. Bandwidth is measured where bytes arrive: bytes that
were sent may still be in a buffer.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import statistics
import time
from collections.abc import Iterator

from lockstep.launch.agent.child import LostError
from lockstep.tools.doctor.check import Facts, Finding, NodeReports, Options, check
from lockstep.tools.doctor.node_rendezvous import NodeGroup
from lockstep.world.network import listen, why_unreached

#: Seconds of measurements in one direction: the most for a pair of nodes, the most for all rounds together,
#: and the least for a pair, which takes precedence.
_MOST, _ALL, _LEAST = 0.25, 3.0, 0.03
_PATIENCE = 2.0
#: Seconds that nodes wait for each other at the end of a round: more than a pair may take.
_BARRIER = 8.0
_PINGS = 20
_BLOCK = bytes(1 << 14)
_TOKEN = 16  # bytes
#: Bandwidth below which an exchange of 100 MB takes two seconds or more.
_SLOW_MBIT = 500.0
_SLOW_MS = 5.0
#: Part of the median bandwidth below which a pair counts as slow.
_PART = 1 / 4


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of the numbers below `count`, so that all pairs appear once.

    In a round, no number is in two pairs. This is the circle method for tournaments: the first number
    stays, the others rotate.
    """
    circle = [*range(count), *([-1] * (count % 2))]
    rounds = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle, reversed(circle), strict=True)
        rounds.append([(a, b) if a < b else (b, a) for a, b in list(pairs)[: len(circle) // 2]])
        circle.insert(1, circle.pop())
    return [[pair for pair in pairs if -1 not in pair] for pairs in rounds]


def _together(rendezvous: NodeGroup, _: NodeReports, __: Options) -> Facts:
    """Measure this node's links to all other nodes; return the bandwidth and latency of each link.

    A link that cannot be measured has an error instead.
    """
    if not rendezvous.reach:
        return []
    token = secrets.token_bytes(_TOKEN)
    with listen(0, loopback=False) as listener:
        listener.settimeout(_PATIENCE)
        own = [listener.getsockname()[1], token.hex()]
        addresses = rendezvous.gather("links/places", own)
        rounds = tournament(len(rendezvous.labels))
        seconds = max(_LEAST, min(_MOST, _ALL / len(rounds)))
        found = []
        for number, pairs in enumerate(rounds):
            pair = next((one for one in pairs if rendezvous.index in one), None)
            if pair is not None:
                rate = _measure(rendezvous, pair, addresses, listener, seconds)
                found.append({"pair": pair, **rate})
            rendezvous.gather(f"links/{number}", True, _BARRIER)
        return found


def _measure(
    rendezvous: NodeGroup,
    pair: tuple[int, int],
    addresses: list[Facts],
    listener: socket.socket,
    seconds: float,
) -> dict[str, Facts]:
    """Measure the link between this node and the other one of `pair`; return bandwidth and latency.

    The first node of the pair sends for `seconds`, then the second. Only the first node measures the
    latency. `addresses` has, by node, the port of its `listener` and a secret token for connecting. If a
    connection fails, the result has only the field `failure`, with the reason.
    """
    first, second = pair
    port, token = addresses[second]
    shown = bytes.fromhex(token)
    try:
        if rendezvous.index == first:
            address = (rendezvous.reach[second].address, port)
            times = []
            with _connect(address, shown) as line:
                for _ in range(_PINGS):
                    began = time.perf_counter()
                    line.sendall(b".")
                    _receive(line, 1)
                    times.append(time.perf_counter() - began)
                _send(line, seconds)
            with _connect(address, shown) as line:
                rate = _receive_for(line, seconds)
            facts = {"mbit": rate, "ms": 1000 * statistics.median(times)}
        else:
            with _accept(listener, shown) as line:
                for _ in range(_PINGS):
                    line.sendall(_receive(line, 1))
                facts = {"mbit": _receive_for(line, seconds)}
            with _accept(listener, shown) as line:
                _send(line, seconds)
    except OSError as error:
        if text := rendezvous.gone():
            raise LostError(text) from error
        return {"failure": why_unreached(error)}
    return facts


def _connect(address: tuple[str, int], token: bytes) -> socket.socket:
    line = socket.create_connection(address, timeout=_PATIENCE)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(token)
    return line


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Accept connections until one sends the secret `token` first; return that connection.

    If no connection sends the token in time, `TimeoutError` is raised.
    """
    deadline = time.monotonic() + 2 * _PATIENCE
    while time.monotonic() < deadline:
        line, _ = listener.accept()
        line.settimeout(_PATIENCE)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            shown = _receive(line, _TOKEN)
        except OSError:
            shown = b""
        if hmac.compare_digest(shown, token):
            return line
        line.close()
    raise TimeoutError


def _receive(line: socket.socket, count: int) -> bytes:
    text = b""
    while len(text) < count:
        part = line.recv(count - len(text))
        if not part:
            raise ConnectionResetError
        text += part
    return text


def _receive_for(line: socket.socket, seconds: float) -> float:
    """Receive for `seconds`, counted from the arrival of the first bytes; return the Mbit/s."""
    buffer = bytearray(1 << 20)
    line.recv_into(buffer)
    began, total, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < seconds:
        part = line.recv_into(buffer)
        elapsed = time.perf_counter() - began
        if not part:
            raise ConnectionResetError
        total += part
    return total * 8 / elapsed / 1e6


def _send(line: socket.socket, seconds: float) -> None:
    """Send bytes until the receiver closes the connection, after about `seconds`.

    If the receiver does not close the connection in time, `TimeoutError` is raised.
    """
    deadline = time.monotonic() + seconds + _PATIENCE
    try:
        while time.monotonic() < deadline:
            line.sendall(_BLOCK)
    except (BrokenPipeError, ConnectionResetError):
        return
    raise TimeoutError


@check("links", together=_together, seconds=40)
def links(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on pairs of nodes with low bandwidth or high latency."""
    ways: dict[tuple[str, str], float] = {}
    delays: dict[tuple[str, str], float] = {}
    failures: dict[tuple[str, str], str] = {}
    for label, found in seen.of("links"):
        for one in found:
            low, high = (seen.labels[index] for index in one["pair"])
            other = high if label == low else low
            if "failure" in one:
                failures.setdefault((low, high), f"{label} {one['failure']}")
                continue
            ways[other, label] = one["mbit"]
            if "ms" in one:
                delays[low, high] = one["ms"]
    if not ways and not failures:
        parted = any("problem" in facts for _, facts in seen.of("network"))
        why = "not all nodes reach each other" if parted else "one host"
        why = "the other nodes did not come" if seen.missed else why
        yield Finding("skipped", f"{why}: nothing to measure")
        return
    for (low, high), why in failures.items():
        text = f"{low} and {high} lost each other while the link between them was measured: {why}"
        advice = "look at cables, the interface, and the kernel's log on both"
        yield Finding("failure", text, advice)
    yield from _judge(ways, delays)


def _judge(
    ways: dict[tuple[str, str], float], delays: dict[tuple[str, str], float]
) -> Iterator[Finding]:
    median = statistics.median(ways.values()) if ways else 0.0
    slow = {pair for pair, rate in ways.items() if rate < max(_SLOW_MBIT, _PART * median)}
    advice = (
        "look at the interface (ethtool), the switch, and other traffic; docs/manual/slow-links.md has "
        "exchanges that send less"
    )
    for place, (sender, receiver) in enumerate(sorted(slow, key=lambda pair: ways[pair])):
        text = f"{sender} to {receiver}: {_rate(ways[sender, receiver])}{', the slowest' * (place == 0)}"
        beside = f"; the median of all is {_rate(median)}" if len(ways) > 2 else ""
        yield Finding("warning", f"{text}{beside}", advice)
    for (low, high), delay in delays.items():
        if delay > _SLOW_MS:
            text = f"{low} and {high}: {delay:.1f} ms there and back; expected at most {_SLOW_MS:g}"
            yield Finding("warning", text, advice)
    if ways and not slow:
        slowest = min(ways, key=lambda pair: ways[pair])
        worst = max(delays.values(), default=0.0)
        text = f"the slowest is {slowest[0]} to {slowest[1]}: {_rate(ways[slowest])}"
        yield Finding("ok", f"{len(ways)} ways; {text}; at most {worst:.2f} ms there and back")


def _rate(mbit: float) -> str:
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"
