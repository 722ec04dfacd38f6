"""`RunCommand`: start `lockstep run` as a child process, for commands that launch a script many times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.registry import STRATEGIES, WITH_SERVERS
from lockstep.settings import OF_SERVERS, TABLE

#: Variables of the caller's environment that must not reach a child launch.
_OURS = ("LOCKSTEP_FAULTS", *(one.variable for one in TABLE.values() if one.of_one_launch))
#: Variables that are an error for a strategy without parameter servers.
_OF_SERVERS = tuple(TABLE[name].variable for name in OF_SERVERS)


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A command `lockstep run` for a script, with options that all of its launches share.

    Attributes:
        of_servers: options that are used only with a strategy that has parameter servers.
    """

    script: Sequence[str]
    options: Sequence[str]
    of_servers: Sequence[str]

    def words(self, strategy: str | None, environ: Mapping[str, str]) -> list[str]:
        """Return the options of `lockstep run` for a launch with `strategy`.

        `None` stands for the strategy that the script chooses. Strategy `ps` gets the option `--servers 1`
        if neither the options nor `environ` give a number of servers.
        """
        if strategy is None:
            return [*self.options, *self.of_servers]
        words = [*self.options, "--strategy", strategy]
        if strategy != WITH_SERVERS:
            return words
        is_given = "--servers" in self.of_servers or TABLE["servers"].variable in environ
        return [*words, *self.of_servers, *(() if is_given else ("--servers", "1"))]

    def environ(self, strategy: str | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` without variables that apply to a single launch.

        Examples are torchrun's `PET_*`. Variables of parameter servers are left out too, if
        `strategy` has no such servers.
        """
        others = _OURS if strategy in (None, WITH_SERVERS) else (*_OURS, *_OF_SERVERS)
        return {
            name: value
            for name, value in environ.items()
            if name not in others and not name.startswith("PET_")
        }

    def program(self, words: Sequence[str]) -> list[str]:
        """Return the command line of `lockstep run` with options `words`."""
        return [sys.executable, "-m", "lockstep", "run", *words, *self.script]

    def start(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        output: Path,
        errors: Path,
        directory: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start `lockstep run` with options `words`; append its output to files `output` and `errors`.

        `directory` is the working directory, by default that of this process.
        """
        with output.open("ab") as out, errors.open("ab") as err:
            return subprocess.Popen(
                self.program(words),
                env=environ,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )


def verdict_in(errors: Path) -> str:
    """Return the failure message in `errors`, the file with the launcher's standard error.

    If the file has no such message, its last eight lines are returned.
    """
    lines = errors.read_text(errors="replace").rstrip().splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("lockstep: ")]
    return "\n".join(lines[marks[-1] :] if marks else lines[-8:])


def parse_names(flag: str, text: str, known: Sequence[str], example: str) -> list[str]:
    """Parse the comma-separated names in a flag's value.

    `flag` is the flag's name for the error, `known` the valid names, and `example` the error's hint.

    Raises:
        UsageError: for an unknown name.
    """
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
    """Return the strategies to run, from `--strategy` and `--strategies`.

    An element `None` stands for the strategy that the script chooses.

    Args:
        one: value of `--strategy`, if given.
        several: value of `--strategies`, if given.
        of_servers: the given flags that require a strategy with parameter servers.

    Raises:
        UsageError: if the flags contradict each other, or a strategy is unknown.
    """
    if one is not None and several is not None:
        raise UsageError(
            f"--strategy {one} beside --strategies {several}; expected one of them",
            hint="--strategies S,… runs each layout with each of its strategies, --strategy S with one",
        )
    strategies: Sequence[str | None] = [one]
    if several is not None:
        example = "for example --strategies ddp,fsdp"
        strategies = parse_names("--strategies", several, STRATEGIES.names(), example)
    if of_servers and None not in strategies and WITH_SERVERS not in strategies:
        flag, names = of_servers[0], one or several
        given = f"--strategy {one}" if several is None else f"--strategies {several}"
        raise UsageError(
            f"{flag} beside {given}, which knows no servers; expected {WITH_SERVERS}",
            hint=f"leave out {flag}; --strategies {names},{WITH_SERVERS} would use it for {WITH_SERVERS}",
        )
    return strategies
