"""What a run is asked to do: flags win over the environment, which wins over the script."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.layout.classes import EXCHANGES, PRECISIONS, STRATEGIES
from lockstep.layout.mesh import parse as parse_mesh
from lockstep.record.loggers import check as check_loggers
from lockstep.world.devices_asked import parse

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run; see `Run` for their meaning.

    Attributes:
        default_replicas: for scripts that name no number, set where layouts are to agree on one.
        default_threads: the same of threads.
        servers: how many parameter servers the launcher has started.

    Raises:
        UsageError: if a setting makes no sense by itself.
    """

    name: str
    seed: int = 0
    replicas: int | None = None
    exact: bool = True
    strategy: str = "auto"
    exchange: str = "auto"
    precision: str = "fp32"
    mesh: str | None = None
    sync_every: int | None = None
    devices: str = "auto"
    threads: int | None = None
    run_dir: Path | None = None
    fresh: bool = False
    progress: bool = True
    stop_on_nan: bool = False
    trace: Path | None = None
    checkpoint_every: float = 600.0
    keep: int = 3
    default_replicas: int | None = None
    default_threads: int | None = None
    servers: int = 0
    staleness: int | None = None
    loggers: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise UsageError(f"the run's name is {self.name!r}; expected a word without '/'")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed!r}; expected an integer of 64 bits")
        self._check_choice("strategy", self.strategy, STRATEGIES)
        self._check_choice("exchange", self.exchange, EXCHANGES)
        parse(self.devices, "devices")
        if self.mesh is not None:
            parse_mesh(self.mesh, "mesh")
        self._check_choice("precision", self.precision, PRECISIONS)
        self._check_count("replicas", self.replicas)
        self._check_count("threads", self.threads)
        self._check_count("sync_every", self.sync_every)
        self._check_count("keep", self.keep)
        check_loggers(self.loggers)
        if not 0 <= self.checkpoint_every < float("inf"):
            raise UsageError(
                f"checkpoint_every is {self.checkpoint_every!r}; expected seconds, or 0 for never"
            )

        late = self.staleness
        if late is not None and (not isinstance(late, int) or late < 0):
            raise UsageError(f"staleness is {late!r}; expected an integer of at least 0")

    def method(self, exchange: str, *, alone: bool) -> dict[str, str]:
        """Return the strategy, also where it is `auto`, beside the `exchange` that was chosen."""
        auto = "single" if alone else "ddp"
        return {
            "strategy": auto if self.strategy == "auto" else self.strategy,
            "exchange": exchange,
        }

    @staticmethod
    def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise UsageError(f"{name} is {value!r}; expected one of {', '.join(choices)}")

    @staticmethod
    def _check_count(name: str, value: int | None) -> None:
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} is {value!r}; expected an integer of at least 1")


#: Settings that come from the launcher alone.
_OF_LAUNCHERS = ("fresh", "trace", "default_replicas", "default_threads", "servers")
#: Settings that a script may give.
OF_SCRIPTS = tuple(one.name for one in fields(Settings) if one.name not in _OF_LAUNCHERS)


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError("expected 1 or 0")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "seed": int,
    "replicas": int,
    "exact": _boolean,
    "strategy": str,
    "exchange": str,
    "precision": str,
    "mesh": str,
    "sync_every": int,
    "devices": str,
    "threads": int,
    "run_dir": Path,
    "fresh": _boolean,
    "progress": _boolean,
    "stop_on_nan": _boolean,
    "trace": Path,
    "checkpoint_every": float,
    "keep": int,
    "default_replicas": int,
    "default_threads": int,
    "servers": int,
    "staleness": int,
    "loggers": _names,
}


_EXPECTED: dict[Callable[[str], Any], str] = {
    int: "an integer",
    float: "a number",
    _boolean: "1 or 0",
}


def from_environment(settings: Settings, environ: Mapping[str, str] | None = None) -> Settings:
    """Return `settings` with every `LOCKSTEP_NAME` of the environment in the place of `name`.

    Raises:
        UsageError: if a variable cannot be read as its setting.
    """
    environ = os.environ if environ is None else environ
    changes: dict[str, Any] = {}
    for setting in fields(settings):
        variable = f"LOCKSTEP_{setting.name.upper()}"
        if setting.name in _PARSERS and variable in environ:
            changes[setting.name] = _parse(setting.name, variable, environ[variable])
    return replace(settings, **changes)


def _parse(name: str, variable: str, text: str) -> Any:
    try:
        return _PARSERS[name](text)
    except ValueError:
        raise UsageError(f"{variable} is {text!r}; expected {_EXPECTED[_PARSERS[name]]}") from None
