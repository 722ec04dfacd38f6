"""Rendezvous config of a launch on several nodes: number of nodes, node rank, rendezvous address."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.errors import UsageError
from lockstep.registry import EnvironmentEntry
from lockstep.world import environments
from lockstep.world.environments import kubernetes
from lockstep.world.environments.torchrun import MARK
from lockstep.world.model import World

_LONGEST = 86_400 * 365  # seconds
_RENDEZVOUS_HINT = (
    "--node-rank K --master-addr HOST on each node, or --rdzv-endpoint HOST "
    "or --rdzv-endpoint file:///SHARED/DIRECTORY"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Values of the command-line flags of a launch on several nodes.

    Attributes:
        count: number of launchers, usually one per node; in an elastic launch, the maximum.
        least: minimum number of launchers of an elastic launch; `None` for a fixed size.
        main_port: port of launcher 0; by default a free one, which the launchers discover.
        endpoint: rendezvous of launchers without node ranks: `HOST`, `HOST:PORT` or `file:///DIRECTORY`.
        id: name of the launch, which separates launches with the same rendezvous address.
        interface: network interface to use; by default one that all other nodes can reach.
        join_timeout: seconds that launchers have to join; `None` means `LOCKSTEP_JOIN_TIMEOUT`.
        last_call: seconds that an elastic launch waits for further launchers, once it has its minimum.
        alone: whether to ignore the environment and start a single launcher.

    Raises:
        UsageError: if a value is out of range, or two values contradict each other.
    """

    count: int | None = None
    least: int | None = None
    rank: int | None = None
    main_address: str | None = None
    main_port: int | None = None
    endpoint: str | None = None
    id: str | None = None
    interface: str | None = None
    join_timeout: float | None = None
    last_call: float | None = None
    alone: bool = False

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise UsageError(f"--nnodes is {self.count}; expected at least 1")
        if self.least is not None and not 1 <= self.least <= (self.count or 0):
            raise UsageError(
                f"--nnodes is {self.least}:{self.count}; expected MIN:MAX with 1 <= MIN <= MAX"
            )
        if self.rank is not None and not 0 <= self.rank < (self.count or 1):
            raise UsageError(
                f"--node-rank is {self.rank} with --nnodes {self.count or 1}; "
                f"expected 0 to {(self.count or 1) - 1}"
            )
        if self.main_port is not None and not 0 < self.main_port < 1 << 16:
            raise UsageError(f"--master-port is {self.main_port}; expected a port from 1 to 65535")
        for flag, seconds in (("join-timeout", self.join_timeout), ("last-call", self.last_call)):
            if seconds is not None and not 0 < seconds <= _LONGEST:
                raise UsageError(
                    f"--{flag} is {seconds}; expected more than 0 seconds, and at most {_LONGEST}"
                )
        if self.main_address is not None and not self.main_address.strip():
            raise UsageError("--master-addr is empty; expected a host or an address")
        fixed = (self.rank, self.main_address, self.main_port)
        if self.endpoint is not None and fixed != (None, None, None):
            raise UsageError(
                "--rdzv-endpoint and --node-rank, --master-addr or --master-port contradict each other",
                hint="launchers are numbered in the order in which they reach an endpoint",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """Settings by which the launchers of one launch find each other.

    Attributes:
        name: name of the launch, the same on all nodes.
        count: number of launchers; in an elastic launch, the maximum.
        least: minimum number of launchers of an elastic launch; `None` for a fixed size.
        index: number of this launcher; `None` if launchers are numbered as they join.
        address: host of the rendezvous store.
        port: port of port discovery on that host, if the user chose one.
        directory: shared directory with the rendezvous store, instead of a host.
        source: origin of these values: names of flags, or of an environment.
        seconds: seconds that launchers have to join.
        last_call: seconds that the first round waits for further launchers, once there are enough.
    """

    name: str
    count: int
    least: int | None = None
    index: int | None = None
    address: str | None = None
    port: int | None = None
    directory: Path | None = None
    source: str
    seconds: float = 300.0
    last_call: float = 30.0

    @property
    def fixed(self) -> bool:
        """Whether the launch has a fixed number of launchers; otherwise it is elastic."""
        return self.least is None

    @property
    def needed(self) -> int:
        """Minimum number of launchers."""
        return self.least or self.count

    @property
    def place(self) -> str:
        """Shared directory or host of the rendezvous, for messages."""
        return str(self.directory or self.address)

    @property
    def shares_output(self) -> bool:
        """Whether a scheduler started the launchers, so that all write to the same terminal or file."""
        return not self.source.startswith("--")


def port_taken(port: int, why: str) -> UsageError:
    """Return the error for a `--master-port` that is not free; `why` is the system's message."""
    return UsageError(
        f"--master-port {port} cannot be opened on this machine: {why}; expected a free port",
        hint="without --master-port, a free one is found",
    )


def parse_count(text: str) -> tuple[int | None, int]:
    """Parse a value of `--nnodes`: `N` gives `(None, N)`, an elastic `MIN:MAX` gives `(MIN, MAX)`.

    Raises:
        UsageError: if `text` has another form.
    """
    least, colon, most = text.rpartition(":")
    if most.isdecimal() and (least.isdecimal() if colon else not least):
        return (int(least) if colon else None), int(most)
    raise UsageError(
        f"--nnodes is {text!r}; expected a number of nodes, or MIN:MAX where they may come and go"
    )


def rendezvous_config(
    nodes: Nodes, work: Sequence[str], environ: Mapping[str, str]
) -> RendezvousConfig | None:
    """Return the rendezvous config of this launcher; `None` if it is the only launcher.

    Flags take precedence over the environment. Launchers started by a Slurm step with several tasks or by
    `mpiexec` need no flags. A launch without `--rdzv-id` is named after `work`, the script and its
    arguments.

    Raises:
        UsageError: if there is no rendezvous address, or the flags contradict the environment.
        WorldError: if the environment contradicts itself.
    """
    if nodes.alone:
        return None
    if nodes.endpoint is not None or nodes.main_address is not None:
        return _by_flags(nodes, work)
    # A launcher inside a worker starts a launch of its own. A PyTorchJob sets RANK for launchers, too.
    inside = MARK in environ or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys()
    found = None if inside else _launchers(nodes, environ)
    if found is not None and found[1].size > 1:
        return _by_environment(nodes, *found, work)
    if (nodes.count or 1) == 1:
        return None
    raise UsageError(
        f"--nnodes is {_shown(nodes)}, but no rendezvous address is given", hint=_RENDEZVOUS_HINT
    )


def _launchers(nodes: Nodes, environ: Mapping[str, str]) -> tuple[EnvironmentEntry, World] | None:
    """Return the environment (such as Slurm) that started this launcher, and the launchers' `World`.

    Returns `None` if no environment that starts launchers is detected.
    """
    if nodes.count is not None:
        environ = {**environ, kubernetes.COUNT: _shown(nodes)}
    is_worker = {"RANK", "WORLD_SIZE"} <= environ.keys()
    for entry in environments.candidates(environ):
        # Of a worker's variables only those of an environment that distinguishes launchers are read.
        if entry.starts_launchers and (not is_worker or entry.launchers):
            world = environments.read(entry, environ, launchers=True)
            if world is not None:
                return entry, world
    return None


def _by_flags(nodes: Nodes, work: Sequence[str]) -> RendezvousConfig | None:
    if nodes.count is None:
        raise UsageError(
            "--rdzv-endpoint or --master-addr without --nnodes; expected the number of nodes",
            hint="for example --nnodes 2",
        )
    name = f"nodes/{nodes.id or _named_after(work)}/{_shown(nodes)}"
    if nodes.count == 1:
        return None
    if nodes.endpoint is not None:
        return replace(_at_endpoint(nodes.endpoint, name, nodes.count), least=nodes.least)
    if nodes.rank is None:
        raise UsageError(
            "--master-addr without --node-rank; expected the number of this node",
            hint=_RENDEZVOUS_HINT,
        )
    return RendezvousConfig(
        name=name,
        count=nodes.count,
        least=nodes.least,
        index=nodes.rank,
        address=nodes.main_address,
        port=nodes.main_port,
        source="--node-rank and --master-addr",
    )


def _shown(nodes: Nodes) -> str:
    """Return the number of nodes as a value of `--nnodes`."""
    return f"{nodes.count}" if nodes.least is None else f"{nodes.least}:{nodes.count}"


def _at_endpoint(endpoint: str, name: str, count: int) -> RendezvousConfig:
    config = RendezvousConfig(name=name, count=count, source="--rdzv-endpoint")
    wrong = UsageError(
        f"--rdzv-endpoint is {endpoint!r}; expected HOST, HOST:PORT or file:///DIRECTORY",
        hint="an IPv6 address is written in brackets, as in [fd00::1]:29500",
    )
    is_file = endpoint.startswith(("file:", "/"))
    try:
        url = urlsplit(endpoint if is_file else f"//{endpoint}", allow_fragments=False)
        port = url.port
    except ValueError:
        raise wrong from None
    if is_file:
        path = url.path if url.scheme == "file" else endpoint
        if not path.startswith("/") or url.netloc or (url.scheme == "file" and url.query):
            raise wrong
        return replace(config, directory=Path(path))
    if not url.hostname or url.path or port == 0:
        raise wrong
    return replace(config, address=url.hostname, port=port)


def endpoint_place(endpoint: str) -> tuple[str | None, int | None]:
    """Parse a value of `--rdzv-endpoint`; return the host and the port.

    The host is `None` for a directory, and the port is `None` if the value has none.

    Raises:
        UsageError: if the value is not a host, `HOST:PORT` or `file:///DIRECTORY`.
    """
    host, colon, port = endpoint.rpartition(":")
    place = _at_endpoint(host if colon and port == "0" else endpoint, "", 2)
    return place.address, place.port


def _by_environment(
    nodes: Nodes, entry: EnvironmentEntry, world: World, work: Sequence[str]
) -> RendezvousConfig:
    if nodes.least is not None and not entry.replaces_launchers:
        raise UsageError(
            f"--nnodes is {_shown(nodes)}, but {world.environment} started {world.size} launchers, "
            "and ends all launchers when one is lost; expected a number",
            hint="leave --nnodes out, or give the rendezvous address of elastic nodes: --rdzv-endpoint",
        )
    if nodes.count not in (None, world.size):
        raise UsageError(
            f"--nnodes is {nodes.count}, but {world.environment} started {world.size} launchers; "
            "expected the same",
            hint="leave --nnodes out: the launchers find each other",
        )
    if nodes.rank not in (None, world.rank):
        raise UsageError(
            f"--node-rank is {nodes.rank}, but {world.environment} started this launcher as number "
            f"{world.rank}; expected the same",
            hint="leave --node-rank out, or give the rendezvous address: --master-addr HOST",
        )
    if world.address is None:
        raise UsageError(
            f"{world.environment} started {world.size} launchers on several nodes, and doesn't say "
            "where the first one is",
            hint="add --nnodes and --rdzv-endpoint HOST or --rdzv-endpoint file:///SHARED/DIRECTORY",
        )
    return RendezvousConfig(
        name=f"{world.key or world.environment}/{nodes.id or _named_after(work)}",
        count=world.size,
        least=nodes.least,
        index=world.rank,
        address=world.address,
        port=nodes.main_port or world.port,
        source=world.environment,
    )


def _named_after(work: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(work)).encode()).hexdigest()[:16]
