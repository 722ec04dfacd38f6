"""Table of all settings of runs and launches, each with its type, default, check, help text and flag.

This table generates the flags of the commands, the `LOCKSTEP_*` variables, the settings that launchers
forward to their ranks, and the page `docs/manual/settings.md`. `lockstep.Run` has an argument for each
setting that a script may give. A flag wins over a variable, which wins over an argument.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lockstep.engine.layout.classes import PRECISIONS
from lockstep.engine.layout.mesh import parse as parse_mesh
from lockstep.errors import UsageError, did_you_mean
from lockstep.registry import EXCHANGES, STRATEGIES, WITH_SERVERS, resolve
from lockstep.setting_checks import (
    Check,
    at_least,
    check_audit,
    check_directory,
    check_seed,
    signal_of,
)

#: Converts the text of a variable or a flag to a value; raises `ValueError` for a text that has none.
Parse = Callable[[str], Any]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def boolean(text: str) -> bool:
    """Convert text such as `1`, `0`, `true` or `false` to a bool; raise `ValueError` for other text."""
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError("expected 1 or 0")


def names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names, such as loggers, into a tuple."""
    return tuple(name for name in text.split(",") if name)


_EXPECTED: dict[Parse, str] = {int: "an integer", float: "a number", boolean: "1 or 0"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Setting:
    """A setting of a run or a launch: its name, type, default, check, flag and help text."""

    name: str
    help: str
    parse: Parse  # converts the text of the flag or of the variable to a value
    default: Any = None
    default_text: str = ""  # meaning of the default, where the value does not show it
    #: raises `UsageError` for invalid values; `module:function` is imported at its first use
    check: Check | str | None = None
    choices: tuple[str, ...] = ()
    of_script: bool = False  # whether `lockstep.Run` takes the setting as an argument
    #: group of the flag in `--help`, and its spelling, such as `--replicas R`; `None` without one
    flag: tuple[str, str] | None = None
    negatable: bool = False  # whether the flag of a boolean has a `--no-` form, too
    other_variable: str = ""
    forwarded: bool = True  # whether launchers pass the value of the flag to their ranks
    blank_is_unset: bool = False  # whether an empty variable is the same as none
    strategy: str | None = None  # the only strategy that takes the setting, if any
    of_one_launch: bool = False  # whether commands with several launches remove its variable
    changes_result: bool = False  # whether results that are not exact depend on it

    @property
    def variable(self) -> str:
        """Name of the environment variable that gives the setting."""
        return self.other_variable or f"LOCKSTEP_{self.name.upper()}"

    @property
    def shown_default(self) -> str:
        """Text that describes the default, for the settings page of the manual and for `--help`."""
        default = "none" if self.default in (None, ()) else write(self.default).removesuffix(".0")
        return self.default_text or default

    @property
    def option(self) -> str:
        """The setting's flag, such as `--replicas`, without a value; empty if the setting has no flag."""
        return "" if self.flag is None else self.flag[1].partition(" ")[0]

    def require(self, value: Any, origin: str) -> None:
        """Raise `UsageError` for an invalid `value`; `origin`: its flag, variable or argument."""
        if self.check is None and self.choices and value not in self.choices:
            raise UsageError(
                f"{origin} is {value!r}; expected one of {', '.join(self.choices)}",
                hint=did_you_mean(str(value), self.choices),
            )
        if self.check is not None and value is not None:
            resolve(self.check)(value, origin)

    def read(self, environ: Mapping[str, str]) -> Any:
        """Return the checked value of the environment variable of this setting; `None` if it is not set."""
        text = environ.get(self.variable)
        if text is None or (self.blank_is_unset and not text):
            return None
        try:
            value = self.parse(text)
        except ValueError:
            wanted = _EXPECTED[self.parse]
            raise UsageError(f"{self.variable} is {text!r}; expected {wanted}") from None
        self.require(value, self.variable)
        return value


def write(value: Any) -> str:
    """Return a setting's value as text, as for its environment variable."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _setting(default: Any, help: str, parse: Parse, **more: Any) -> Any:  # noqa: A002 - of argparse
    """Declare a setting as a field of `Settings`; `more`: values of further fields of class `Setting`."""
    row = {"help": help, "parse": parse, "default": default, "of_script": True, **more}
    return field(default=default, metadata=row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a run's settings; an invalid value raises `UsageError` when the object is made."""

    name: str
    seed: int = _setting(0, "everything random follows from it", int, check=check_seed)
    replicas: int | None = _setting(
        None,
        "number of logical data-parallel workers, at least as many as ranks",
        int,
        default_text="the number of ranks",
        check=at_least(1),
        flag=("layout", "--replicas R"),
    )
    exact: bool = _setting(
        True,
        "refuse settings and calls that make the result depend on the layout",
        boolean,
        flag=("training", "--exact"),
        negatable=True,
    )
    strategy: str = _setting(
        "auto",
        "how models are distributed; `auto` is `ddp` on several ranks, else `single`",
        str,
        choices=STRATEGIES.own,
        check=STRATEGIES.require,
        flag=("training", "--strategy S"),
        changes_result=True,
    )
    exchange: str = _setting(
        "auto",
        "how gradients are summed; `auto` is the fastest exact one",
        str,
        choices=EXCHANGES.own,
        check=EXCHANGES.require,
        flag=("training", "--exchange E"),
        changes_result=True,
    )
    sync_every: int | None = _setting(
        None,
        "steps between two averages of the parameters with `local-sgd` or `diloco`",
        int,
        default_text="16 for `local-sgd`, 50 for `diloco`",
        check=at_least(1),
        flag=("training", "--sync-every H"),
        changes_result=True,
    )
    mesh: str | None = _setting(
        None,
        "`DATAxMODEL`, such as `2x2`: number of copies of the model, and of ranks that hold one copy",
        str,
        default_text="one copy over all ranks with `pipeline` and `tensor`, else one copy per rank",
        check=parse_mesh,
        flag=("training", "--mesh DATAxMODEL"),
    )
    servers: int = _setting(
        0,
        "number of parameter servers beside the ranks, for strategy `ps`",
        int,
        of_script=False,
        check=at_least(0),
        flag=("training", "--servers S"),
        strategy=WITH_SERVERS,
    )
    staleness: int | None = _setting(
        None,
        "compute gradients with parameters that are exactly K updates old; with strategy `ps`, the "
        "servers then run the optimizer",
        int,
        default_text="none; with `ps`, the workers run the optimizer",
        check=at_least(0),
        flag=("training", "--staleness K"),
        changes_result=True,
    )
    precision: str = _setting(
        "fp32",
        "run forward passes under autocast in `bf16` or `fp16`; `fp16` scales the loss",
        str,
        choices=PRECISIONS,
        flag=("training", "--precision P"),
    )
    devices: str = _setting(
        "auto",
        "`cpu`, `gpu`, `auto`, or one device per rank of a node, such as `2,3` or `GPU-8f5c1a2b,MIG-…`",
        str,
        check="lockstep.world.devices_asked:parse",
        flag=("layout", "--devices D"),
        blank_is_unset=True,
    )
    threads: int | None = _setting(
        None,
        "intra-op threads per process",
        int,
        default_text="the cores divided by the replicas",
        check=at_least(1),
        flag=("layout", "--threads T"),
    )
    run_dir: Path | None = _setting(  # noqa: RUF009 - a field
        None,
        "directory of the run",
        Path,
        default_text="`runs/NAME/TIME`, a new one",
        check=check_directory,
        flag=("records", "--run-dir DIR"),
        of_one_launch=True,
    )
    fresh: bool = _setting(
        False,
        "overwrite a finished run in its directory",
        boolean,
        of_script=False,
        flag=("records", "--fresh"),
        of_one_launch=True,
    )
    resume: bool = _setting(
        False,
        "continue the newest unfinished run of the same script and arguments that has a checkpoint",
        boolean,
        of_script=False,
        flag=("records", "--resume"),
        forwarded=False,
        of_one_launch=True,
    )
    progress: bool = _setting(True, "show a progress bar, or lines, on the main rank", boolean)
    stop_on_nan: bool = _setting(
        False,
        "check every loss, and stop at the first that is not finite",
        boolean,
        flag=("records", "--stop-on-nan"),
    )
    audit: str = _setting(
        "1024",
        "compute a microbatch twice and compare the bits: `K` for powers of two and every K steps, `first` "
        "for the first batch of loops alone, `off`",
        str,
        check=check_audit,
        flag=("training", "--audit off|first|K"),
    )
    checkpoint_every: float = _setting(
        600.0,
        "seconds between periodic checkpoints, beside those of `run.save`; 0 for none",
        float,
        check=at_least(0, float),
        flag=("fault tolerance", "--checkpoint-every SECONDS"),
    )
    keep: int = _setting(
        3,
        "number of latest checkpoints to keep, beside the best",
        int,
        check=at_least(1),
        flag=("fault tolerance", "--keep N"),
    )
    anchors: int = _setting(
        0,
        "steps between two anchors, which are checkpoints that stay, for `lockstep replay`; 0 for none",
        int,
        check=at_least(0),
        flag=("records", "--anchors STEPS"),
    )
    anchors_gb: float = _setting(
        10.0,
        "gigabytes of anchors; beyond that every second one is removed",
        float,
        check=at_least(0, float),
        flag=("records", "--anchors-gb GB"),
    )
    hash_every: int | None = _setting(
        None,
        "record each loss, and hashes of gradients and parameters every K steps, for `lockstep replay`; 0 "
        "records neither",
        int,
        default_text="so often that it takes less than a hundredth of the time of steps",
        check=at_least(0),
        flag=("records", "--hash-every K"),
    )
    loggers: tuple[Any, ...] = _setting(
        (),
        "forward `run.log` to `tensorboard`, `wandb` or `mlflow`",
        names,
        check="lockstep.state.record.loggers:check",
        flag=("records", "--logger NAME"),
        of_one_launch=True,
    )
    trace: Path | None = _setting(  # noqa: RUF009 - a field
        None,
        "directory of the trace that `lockstep verify` compares",
        Path,
        default_text="no trace",
        of_script=False,
        of_one_launch=True,
    )
    default_replicas: int | None = _setting(
        None,
        "`replicas` of a script that sets none",
        int,
        of_script=False,
        check=at_least(1),
    )
    default_threads: int | None = _setting(
        None,
        "`threads` of a script that sets none",
        int,
        of_script=False,
        check=at_least(1),
    )

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise UsageError(f"the run's name is {self.name!r}; expected a word without '/'")
        for name in OF_RUNS:
            TABLE[name].require(getattr(self, name), name)


def from_environment(settings: Settings, environ: Mapping[str, str] | None = None) -> Settings:
    """Return a copy of `settings` with the values of those variables `LOCKSTEP_…` that are set."""
    environ = os.environ if environ is None else environ
    values = {name: TABLE[name].read(environ) for name in OF_RUNS}
    return replace(settings, **{name: value for name, value in values.items() if value is not None})


_OF_LAUNCHERS = (
    Setting(
        name="bind",
        help="`cores`: pin each rank to cores of its own",
        parse=str,
        default="none",
        choices=("none", "cores"),
        flag=("layout", "--bind"),
        blank_is_unset=True,
    ),
    Setting(
        name="max_restarts",
        help="maximum number of restarts in a row without progress",
        parse=int,
        default_text="3; 0 for exceptions that the script raises, and for scripts without `lockstep.Run`",
        check=at_least(0),
        flag=("fault tolerance", "--max-restarts K"),
        forwarded=False,
        blank_is_unset=True,
        of_one_launch=True,
    ),
    Setting(
        name="preempt_signal",
        help="signal, such as `USR1`, on which a run saves its state and exits with 75, as on SIGTERM",
        parse=str,
        default_text="SIGTERM only",
        check=signal_of,
        flag=("fault tolerance", "--preempt-signal NAME"),
        blank_is_unset=True,
    ),
    Setting(
        name="hang_timeout",
        help="seconds without progress on any rank after which a launch counts as hung; 0 for no limit",
        parse=float,
        default=1800.0,
        check=at_least(0, float),
        flag=("fault tolerance", "--hang-timeout SECONDS"),
        forwarded=False,
        blank_is_unset=True,
    ),
    Setting(
        name="shutdown_timeout",
        help="seconds between SIGTERM and SIGKILL when ranks are ended",
        parse=float,
        default=5.0,
        check=at_least(0, float),
        flag=("torchrun", "--shutdown-timeout SECONDS"),
        other_variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        forwarded=False,
        blank_is_unset=True,
    ),
)
#: All settings by name: first the settings of runs, then the settings of launchers.
TABLE: dict[str, Setting] = {
    one.name: Setting(name=one.name, **one.metadata) for one in fields(Settings) if one.metadata
}
#: Names of the settings of runs, which ranks read.
OF_RUNS = tuple(TABLE)
#: Names of the settings that are arguments of `lockstep.Run`.
OF_SCRIPTS = tuple(name for name, one in TABLE.items() if one.of_script)
TABLE |= {one.name: one for one in _OF_LAUNCHERS}
#: Names of the settings that only the strategy with parameter servers takes.
OF_SERVERS = tuple(name for name, one in TABLE.items() if one.strategy == WITH_SERVERS)
