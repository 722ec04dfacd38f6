"""Translate flags of torchrun, which `lockstep run` accepts too, to values of a `LaunchSpec`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from lockstep.errors import UnreachableError, UsageError, did_you_mean
from lockstep.launch.nodes.config import Nodes, endpoint_place
from lockstep.launch.spec import StartMethod, TargetKind
from lockstep.world import network

_RENDEZVOUS_HINT = (
    "--rdzv-endpoint HOST or --rdzv-endpoint file:///SHARED/DIRECTORY needs no other service"
)
_START: Mapping[str, StartMethod] = {"spawn": "spawn", "fork": "fork", "forkserver": "fork"}
#: Signals that the launcher handles without a flag.
_HANDLED = ("SIGTERM", "SIGINT", "SIGHUP")
#: Keys of `--rdzv-conf` with their field of `Nodes`; then keys that are accepted without effect.
_CONF = {
    "timeout": "join_timeout",
    "join_timeout": "join_timeout",
    "last_call_timeout": "last_call",
}
_CONF_WITHOUT_EFFECT = frozenset(
    {
        *("close_timeout", "heartbeat_timeout", "read_timeout"),
        *("keep_alive_interval", "keep_alive_max_attempt"),
        *("is_host", "rank", "store_type", "use_libuv"),
    }
)
#: Flags without effect, with the reason.
_WITHOUT_EFFECT = {
    "monitor_interval": "the launcher learns at once that a rank has ended",
    "event_log_handler": "run.json and events/ in the run's directory have the events of a run",
}
#: Flags that raise an error, with a hint.
_REFUSED = {
    "logs_specs": "--log-dir, --redirects and --tee say where output goes",
    "duplicate_stdout_filters": "grep finds the lines in the log files of --log-dir",
    "duplicate_stderr_filters": "grep finds the lines in the log files of --log-dir",
    "virtual_local_rank": "a script finds its GPU at LOCAL_RANK; --devices chooses the GPUs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunFlags:
    """Values of torchrun's flags that `lockstep run` translates; `None` or `False` if not given.

    Raises:
        UsageError: for a flag or value that Lockstep does not support.
    """

    standalone: bool = False
    rdzv_backend: str | None = None
    rdzv_conf: str | None = None
    local_addr: str | None = None
    start_method: str | None = None
    no_python: bool = False
    run_path: bool = False
    numa_binding: str | None = None
    signals_to_handle: str | None = None
    monitor_interval: float | None = None
    event_log_handler: str | None = None
    logs_specs: str | None = None
    duplicate_stdout_filters: str | None = None
    duplicate_stderr_filters: str | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        for name, use in _REFUSED.items():
            if getattr(self, name):
                raise UsageError(f"Lockstep has no {_flag(name)}", hint=use)
        if self.rdzv_backend not in (None, "c10d", "static"):
            raise UsageError(
                f"--rdzv-backend is {self.rdzv_backend!r}; expected c10d or static",
                hint=_RENDEZVOUS_HINT,
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about given flags that have no effect."""
        given = [name for name in _WITHOUT_EFFECT if getattr(self, name) not in (None, "null")]
        notes = [f"{_flag(name)} has no effect: {_WITHOUT_EFFECT[name]}" for name in given]
        idle = sorted(_CONF_WITHOUT_EFFECT & _pairs(self.rdzv_conf).keys())
        if idle:
            notes.append(
                f"--rdzv-conf {', '.join(idle)} has no effect on how Lockstep's nodes meet"
            )
        return tuple(notes)

    @property
    def signals(self) -> tuple[str, ...]:
        """Signals in `--signals-to-handle` that the launcher does not handle by default."""
        words = (self.signals_to_handle or "").upper().split(",")
        return tuple(word.strip() for word in words if word.strip() not in ("", *_HANDLED))

    def kind(self, *, module: bool) -> TargetKind:
        """Return the kind of target: `module`, `program` or `script`.

        `module` is whether `-m` is given.

        Raises:
            UsageError: if `-m` and `--no-python` are both given.
        """
        if module and self._is_program:
            raise UsageError("-m and --no-python contradict each other; expected one of them")
        if module:
            return "module"
        return "program" if self._is_program else "script"

    @property
    def _is_program(self) -> bool:
        return self.no_python and not self.run_path

    def start(self, own: StartMethod | None) -> StartMethod:
        """Return the start method: `own`, the value of `--start`, or else that of torchrun's flags.

        Raises:
            UsageError: if the method is unknown, or contradicts another flag.
        """
        if self._is_program:
            return own or "exec"
        asked = own or _START.get(self.start_method or "fork")
        if asked is None:
            raise UsageError(
                f"--start-method is {self.start_method!r}; expected spawn, fork or forkserver"
            )
        if self.run_path and asked == "exec":
            raise UsageError(
                "--run-path and --start exec contradict each other",
                hint="leave --run-path out, or choose fork or spawn",
            )
        return asked


def rendezvous_nodes(
    asked: TorchrunFlags, nodes: Mapping[str, object]
) -> tuple[Nodes, tuple[str, ...]]:
    """Return the settings of a launch on several nodes, and messages about flags without effect.

    `asked` are the flags that only torchrun has. `nodes` are the other flags for nodes, by their names as
    arguments of `Nodes`.

    Raises:
        UsageError: if flags contradict each other.
    """
    given = {**_conf(asked.rdzv_conf), **{k: v for k, v in nodes.items() if v is not None}}
    notes: list[str] = []
    if given.get("main_port") == 0:  # any port, as in torchrun
        del given["main_port"]
    if asked.standalone:
        least = given.get("least", given.get("count", 1))
        if least != 1:
            raise UsageError(
                f"--standalone and --nnodes {least} contradict each other; expected one node",
                hint="leave one of them out",
            )
        kept = {name: given[name] for name in ("main_port", "id") if name in given}
        return Nodes(count=1, alone=True, **kept), ()  # type: ignore[arg-type]
    if "endpoint" in given:
        notes += _at_endpoint(given, asked.rdzv_backend)
    if "count" not in given:
        # As in torchrun, an address of this machine means one node.
        place = given.get("main_address")
        if "endpoint" in given:
            place, _ = endpoint_place(str(given["endpoint"]))
        with contextlib.suppress(UnreachableError):
            if isinstance(place, str) and network.is_here(place):
                given["count"] = 1
    if asked.local_addr and given.get("count", 1) == 1:
        notes.append("--local-addr has no effect: ranks of one node use the loopback interface")
    elif asked.local_addr and "interface" not in given:
        given["interface"] = _interface_of(asked.local_addr)
    return Nodes(**given), tuple(notes)  # type: ignore[arg-type]


def _at_endpoint(given: dict[str, object], backend: str | None) -> list[str]:
    """Remove the arguments that `--rdzv-endpoint` replaces from `given`; return a message for each.

    `given` are arguments of `Nodes`, changed in place; `backend` is the value of `--rdzv-backend`. If
    `given` has a node rank, and `backend` is not `c10d`, the endpoint becomes the main address and port.
    Otherwise the endpoint stays and the node rank is removed: nodes are numbered as they join.
    """
    address, port = endpoint_place(str(given["endpoint"]))
    idle = [name for name in ("main_address", "main_port") if given.pop(name, None) is not None]
    if backend != "c10d" and address is not None and "rank" in given:
        del given["endpoint"]
        given |= {"main_address": address} | ({"main_port": port} if port else {})
    elif given.pop("rank", None) is not None:
        idle.append("rank")
    names = {"main_address": "--master-addr", "main_port": "--master-port", "rank": "--node-rank"}
    return [f"{names[name]} has no effect beside --rdzv-endpoint" for name in idle]


def _interface_of(address: str) -> str:
    """Return the name of this machine's network interface with the given address."""
    found = network.addresses_of(address)
    own = network.interfaces()
    for one in own:
        if one.address in found:
            return one.name
    known = ", ".join(f"{one.address} ({one.name})" for one in own)
    raise UsageError(f"--local-addr is {address!r}, no address of this machine; expected {known}")


def _conf(text: str | None) -> dict[str, object]:
    """Parse a value of `--rdzv-conf`; return supported settings by their field names in `Nodes`."""
    settings: dict[str, object] = {}
    for key, value in _pairs(text).items():
        if key in _CONF:
            try:
                settings[_CONF[key]] = float(value)
            except ValueError:
                raise UsageError(f"--rdzv-conf has {key}={value}; expected seconds") from None
        elif (key, value) == ("store_type", "file"):
            raise UsageError(
                "--rdzv-conf says store_type=file; Lockstep's rendezvous is a directory",
                hint="--rdzv-endpoint file:///SHARED/DIRECTORY, without store_type",
            )
        elif key not in _CONF_WITHOUT_EFFECT:
            raise UsageError(
                f"--rdzv-conf has {key!r}; expected one of {', '.join(_CONF)}",
                hint=did_you_mean(key, [*_CONF, *_CONF_WITHOUT_EFFECT]),
            )
    return settings


def _pairs(text: str | None) -> dict[str, str]:
    words = [word.partition("=") for word in (text or "").split(",") if word]
    if any(not (key and equals and value) for key, equals, value in words):
        raise UsageError(f"--rdzv-conf is {text!r}; expected KEY=VALUE,KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in words}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def asked_of(options: Mapping[str, object]) -> TorchrunFlags:
    """Return the torchrun flags among the parsed command-line options."""
    names = [field.name for field in dataclasses.fields(TorchrunFlags)]
    return TorchrunFlags(**cast("dict[str, str]", {name: options[name] for name in names}))  # type: ignore[arg-type]
