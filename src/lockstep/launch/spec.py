"""`LaunchSpec`: the validated request of a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from lockstep.errors import UsageError
from lockstep.launch.fault_tolerance import FaultTolerance
from lockstep.launch.given import Given
from lockstep.launch.nodes.config import Nodes
from lockstep.launch.streams import Streams

StartMethod = Literal["fork", "spawn", "exec"]
TargetKind = Literal["script", "module", "function", "program"]
LocalRankOption = Literal["auto", "none", "--local-rank", "--local_rank"]
Ranks = int | Literal["cpu", "gpu", "auto"]

#: What `n` may be besides a number.
_WORDS = ("cpu", "gpu", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One launch as asked for, before anything is known about the machine.

    Attributes:
        target: path of a script, name of a module, qualified name of a function, or a program.
        kind: which of the four `target` is.
        args: arguments of the script, module or program.
        n: number of ranks: at least 1, or `cpu`, `gpu` or `auto`; `None` for one, or for as many as
            `devices` names.
        start: how workers come to life.
        settings: what flags give; for others the variables of the environment count, and then the script.
        signals: names of signals that end the launch as SIGTERM does, and are passed on to the ranks of
            scripts that have opened no run.
        log_dir: where logs go; `None` leaves the run's directory.
        streams: which of the ranks' streams the terminal shows.
        role: what scripts read as `ROLE_NAME`.
        local_rank_option: option by which old scripts get their local rank: `auto` until the script's
            source was read for it, then one of two spellings or `none`.
        nodes: what the user says of several nodes.
        command: the command line without the flags that choose a run directory; empty for a function.

    Raises:
        UsageError: if a value cannot work on any machine.
    """

    target: str
    kind: TargetKind = "script"
    args: tuple[str, ...] = ()
    n: Ranks | None = None
    start: StartMethod = "fork"
    settings: Given = field(default_factory=Given)
    signals: tuple[str, ...] = ()
    log_dir: Path | None = None
    streams: Streams = field(default_factory=Streams)
    role: str = "default"
    local_rank_option: LocalRankOption = "auto"
    nodes: Nodes = field(default_factory=Nodes)
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_ranks()
        self._check_choice("--start", self.start, get_args(StartMethod))
        self._check_choice("the kind of target", self.kind, get_args(TargetKind))
        self._check_choice(
            "the local rank's option", self.local_rank_option, get_args(LocalRankOption)
        )
        _ = self.fault_tolerance  # checks the signals
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
        """Where logs and records go; `None` makes a new directory."""
        return self.settings.get("run_dir")

    @property
    def fault_tolerance(self) -> FaultTolerance:
        """What the user says of failures."""
        return FaultTolerance(self.settings, self.signals)

    @property
    def name(self) -> str:
        """What the run is called in `runs/`: the stem of script or program, the module, the function."""
        is_file = self.kind in ("script", "program")
        return Path(self.target).stem if is_file else self.target.rpartition(".")[2]

    def _check_ranks(self) -> None:
        if isinstance(self.n, str):
            self._check_choice("-n", self.n, _WORDS)
        elif self.n is not None and (isinstance(self.n, bool) or self.n < 1):
            raise UsageError(
                f"-n is {self.n}; expected at least 1 rank",
                hint="-n takes a number, or cpu, gpu or auto",
            )

    @staticmethod
    def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise UsageError(f"{flag} is {value!r}; expected one of {', '.join(choices)}")


def parse_ranks(text: str) -> Ranks:
    """Return the value of `-n` that `text` spells.

    Raises:
        UsageError: if it is neither an integer nor `cpu`, `gpu` or `auto`.
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
