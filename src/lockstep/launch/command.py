"""`lockstep run` as a process of its own: for verbs that start a script many times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.registry import STRATEGIES, WITH_SERVERS
from lockstep.settings import OF_SERVERS, TABLE

#: Variables that would change what a launch is.
_OURS = ("LOCKSTEP_FAULTS", *(one.variable for one in TABLE.values() if one.of_one_launch))
#: Variables that a strategy without servers would refuse.
_OF_SERVERS = tuple(TABLE[name].variable for name in OF_SERVERS)


@dataclass(frozen=True, slots=True)
class RunCommand:
    """`lockstep run` with the script and the options of every launch.

    Attributes:
        of_servers: those that only a strategy with servers takes.
    """

    script: Sequence[str]
    options: Sequence[str]
    of_servers: Sequence[str]

    def words(self, strategy: str | None, environ: Mapping[str, str]) -> list[str]:
        """Return the options of `lockstep run` with a strategy; servers without a number are 1."""
        if strategy is None:
            return [*self.options, *self.of_servers]
        words = [*self.options, "--strategy", strategy]
        if strategy != WITH_SERVERS:
            return words
        is_given = "--servers" in self.of_servers or TABLE["servers"].variable in environ
        return [*words, *self.of_servers, *(() if is_given else ("--servers", "1"))]

    def environ(self, strategy: str | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a launch keeps: `PET_*` variables are another launch's."""
        others = _OURS if strategy in (None, WITH_SERVERS) else (*_OURS, *_OF_SERVERS)
        return {
            name: value
            for name, value in environ.items()
            if name not in others and not name.startswith("PET_")
        }

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], output: Path, errors: Path
    ) -> subprocess.Popen[bytes]:
        """Start `lockstep run` with options `words`; append its output and errors to files."""
        with output.open("ab") as out, errors.open("ab") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "lockstep", "run", *words, *self.script],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )


def verdict_in(errors: Path) -> str:
    """Return the launcher's verdict: the last lines of its standard error."""
    lines = errors.read_text(errors="replace").rstrip().splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("lockstep: ")]
    return "\n".join(lines[marks[-1] :] if marks else lines[-8:])


def parse_strategies(text: str) -> list[str]:
    """Return the strategies in a word such as `ddp,fsdp`.

    Raises:
        UsageError: for a name that no strategy has.
    """
    return parse_names(
        "--strategies", text, STRATEGIES.names(), "for example --strategies ddp,fsdp"
    )


def parse_names(flag: str, text: str, known: Sequence[str], example: str) -> list[str]:
    """Return the names in a flag's list with commas; raise `UsageError` for one that is not `known`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(
                f"{flag} names {name!r}; expected some of {', '.join(known)}", hint=example
            )
    return names


def choose_strategies(
    one: str | None, several: str | None, of_servers: Sequence[str]
) -> Sequence[str | None]:
    """Return the strategies of each layout from `--strategy` and `--strategies`; `None` for the script's.

    `of_servers` are the flags that only a strategy with servers takes, as they were given.

    Raises:
        UsageError: if they don't go together, or one has a name that no strategy has.
    """
    if one is not None and several is not None:
        raise UsageError(
            f"--strategy {one} beside --strategies {several}; expected one of them",
            hint="--strategies S,… runs each layout with each of its strategies, --strategy S with one",
        )
    strategies = [one] if several is None else parse_strategies(several)
    if of_servers and None not in strategies and WITH_SERVERS not in strategies:
        flag, names = of_servers[0], one or several
        given = f"--strategy {one}" if several is None else f"--strategies {several}"
        raise UsageError(
            f"{flag} beside {given}, which knows no servers; expected {WITH_SERVERS}",
            hint=f"leave out {flag}; --strategies {names},{WITH_SERVERS} would use it for {WITH_SERVERS}",
        )
    return strategies
