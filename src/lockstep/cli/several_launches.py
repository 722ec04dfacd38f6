"""Flags and run directories of commands that launch a script several times, such as `verify`, `bench`."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli import setting_flags
from lockstep.cli.parser import Parser
from lockstep.errors import UsageError
from lockstep.settings import OF_SERVERS

if TYPE_CHECKING:
    from lockstep.launch.command import RunCommand


def add_shared_flags(
    parser: Parser, verb: str, *, replicas: str, kept: str, threads: str = ""
) -> None:
    """Add SCRIPT, and those flags of `lockstep run` that apply to each launch of the script.

    `verb` is the command, `verify` or `bench`. `replicas`, `kept` and `threads` are the help texts of
    `--replicas`, `--keep-runs` and `--threads`.
    """
    parser.takes_script = True
    parser.advice = lambda options, left: (
        f"arguments of the script come after --: lockstep {verb} {options.target} -- {' '.join(left)}"
    )
    setting_flags.add(parser, "replicas", help=replicas)
    setting_flags.add(parser, "threads", **({"help": threads} if threads else {}))
    kinds = {"choices": ("auto", "cpu", "gpu"), "metavar": None, "help": "devices of the ranks"}
    setting_flags.add(parser, "devices", **kinds)
    setting_flags.add_training(parser)
    parser.add_argument("--keep-runs", type=Path, metavar="DIR", help=kept)
    parser.add_argument("target", metavar="SCRIPT", help=f"the script to {verb}")


def run_command(
    options: argparse.Namespace, *chosen_here: str
) -> tuple[RunCommand, Sequence[str | None]]:
    """Return the command that all launches have in common, and the strategies to run it with.

    A strategy `None` stands for the one that the script chooses. The command leaves out the flags of
    settings in `chosen_here`, which the caller sets for each launch.

    Raises:
        UsageError: if a flag is invalid.
    """
    from lockstep.launch.command import RunCommand, choose_strategies
    from lockstep.launch.flag_settings import FlagSettings
    from lockstep.launch.target.source import check_script

    FlagSettings(**setting_flags.given(options, setting_flags.SHARED))
    of_servers = setting_flags.words(options, OF_SERVERS)
    strategies = choose_strategies(options.strategy, options.strategies, of_servers)
    check_script(options.target)
    own = ("strategy", *OF_SERVERS, *chosen_here)
    words = setting_flags.words(options, (name for name in setting_flags.SHARED if name not in own))
    return RunCommand([options.target, *options.script_args], words, of_servers), strategies


@contextlib.contextmanager
def kept_directory(keep: Path | None, verb: str) -> Iterator[Path]:
    """Context manager: yield a directory for the runs of a command, `keep` or a temporary one.

    `verb` is the command's name, which the temporary directory's name contains.

    Raises:
        UsageError: if `keep` exists already.
    """
    if keep is not None:
        if keep.exists():
            raise UsageError(
                f"{keep} exists already; expected a new directory",
                hint="name another with --keep-runs",
            )
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"lockstep-{verb}-") as directory:
        yield Path(directory)
