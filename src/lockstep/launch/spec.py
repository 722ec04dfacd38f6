"""`LaunchSpec`: script, number of ranks, start method and other options of a requested launch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from lockstep.errors import UsageError
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.nodes.config import Nodes
from lockstep.launch.streams import Streams
from lockstep.setting_checks import signal_of

StartMethod = Literal["fork", "spawn", "exec"]
TargetKind = Literal["script", "module", "function", "program"]
LocalRankOption = Literal["auto", "none", "--local-rank", "--local_rank"]
Ranks = int | Literal["cpu", "gpu", "auto"]

#: Values of `-n` besides a number.
_WORDS = ("cpu", "gpu", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """A requested launch, independent of the machine.

    Attributes:
        target: path of a script, name of a module, qualified name of a function, or a program.
        args: arguments of the script, module or program.
        n: number of ranks of this launcher; `None` for one rank, or one for each device in `devices`.
        settings: settings given by flags.
        signals: names of signals that end the launch as SIGTERM does; ranks that are not inside
            `lockstep.Run` get the same signal.
        log_dir: directory of log files; `None` for `logs/` in the run directory.
        role: value of `ROLE_NAME` in the workers' environment.
        local_rank_option: option with which an old script takes its local rank; `auto` before the script's
            source was read.
        command: command line without the flags that choose a run directory; empty for a function.

    Raises:
        UsageError: if a value is invalid on every machine.
    """

    target: str
    kind: TargetKind = "script"
    args: tuple[str, ...] = ()
    n: Ranks | None = None
    start: StartMethod = "fork"
    settings: FlagSettings = field(default_factory=FlagSettings)
    signals: tuple[str, ...] = ()
    log_dir: Path | None = None
    streams: Streams = field(default_factory=Streams)
    role: str = "default"
    local_rank_option: LocalRankOption = "auto"
    nodes: Nodes = field(default_factory=Nodes)
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.n, str):
            self._check_choice("-n", self.n, _WORDS)
        elif self.n is not None and (isinstance(self.n, bool) or self.n < 1):
            raise UsageError(
                f"-n is {self.n}; expected at least 1 rank",
                hint="-n takes a number, or cpu, gpu or auto",
            )
        self._check_choice("--start", self.start, get_args(StartMethod))
        self._check_choice("the kind of target", self.kind, get_args(TargetKind))
        self._check_choice(
            "the local rank's option", self.local_rank_option, get_args(LocalRankOption)
        )
        _ = self.signals_passed_on  # checks them
        if self.kind == "function" and self.start == "exec":
            raise UsageError(
                "a function cannot be started by exec; expected fork or spawn",
                hint="leave out `start`",
            )
        if self.kind == "program" and self.start != "exec":
            raise UsageError(
                f"a program is no Python that could be started by {self.start}; expected exec",
                hint="leave out --start with --no-python",
            )

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run; `None` for a new one in `runs/`."""
        # In a rank, the variable names the run of that rank; this launch begins one of its own.
        environ = {} if "LOCKSTEP_LAUNCH" in os.environ else os.environ
        named: Path | None = self.settings.value("run_dir", environ)
        return named

    @property
    def signals_passed_on(self) -> frozenset[signal.Signals]:
        """Signals that the launcher passes on to the ranks unchanged."""
        return frozenset(signal_of(name, "--signals-to-handle") for name in self.signals)

    def save_signals(self, environ: Mapping[str, str]) -> frozenset[signal.Signals]:
        """Return the signals besides SIGTERM on which a run saves its state before it ends."""
        name = self.settings.value("preempt_signal", environ)
        origin = self.settings.origin("preempt_signal")
        return self.signals_passed_on | ({signal_of(name, origin)} if name else set())

    @property
    def name(self) -> str:
        """Name of the run in `runs/`: stem of the script or program, or name of the module or function."""
        is_file = self.kind in ("script", "program")
        return Path(self.target).stem if is_file else self.target.rpartition(".")[2]

    @staticmethod
    def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise UsageError(f"{flag} is {value!r}; expected one of {', '.join(choices)}")


def parse_ranks(text: str) -> Ranks:
    """Parse a value of `-n`, the number of ranks.

    Raises:
        UsageError: if `text` is neither an integer nor `cpu`, `gpu` or `auto`.
    """
    if text in _WORDS:
        return cast("Ranks", text)
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"-n is {text!r}; expected a number of ranks, or cpu, gpu or auto",
            hint="for example `lockstep run -n 2 train.py`",
        ) from None
