"""`RunCommand`: start `lockstep run` as a child process, for commands that launch a script many times."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.registry import EXCHANGES, STRATEGIES, WITH_SERVERS
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

    @contextlib.contextmanager
    def started(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        directory: Path,
        working_directory: Path | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Context manager: start `lockstep run` with options `words`; kill it at the end if it still runs.

        Its output is appended to two files in `directory`. The working directory is by default that of
        this process.
        """
        output, errors = directory / "output.txt", directory / "errors.txt"
        with output.open("ab") as out, errors.open("ab") as err:
            launcher = subprocess.Popen(
                self.program(words),
                env=environ,
                cwd=working_directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        try:
            yield launcher
        finally:
            launcher.kill()  # its workers go with it
            launcher.wait()


def errors_in(directory: Path) -> str:
    """Return the standard error of the launches whose output is in `directory`."""
    return (directory / "errors.txt").read_text(errors="replace")


def verdict_in(directory: Path) -> str:
    """Return the failure message of the last launch whose output is in `directory`.

    If the launch has printed no such message, the last eight lines of its standard error are returned.
    """
    lines = errors_in(directory).rstrip().splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("lockstep: ")]
    return "\n".join(lines[marks[-1] :] if marks else lines[-8:])


def _choose(
    flags: tuple[str, str], one: str | None, several: str | None, known: Sequence[str], example: str
) -> Sequence[str | None]:
    """Return the names that one of two flags gives, such as `--strategy` and `--strategies`.

    The name `None` stands for what the script chooses. `flags` are the two flags, `one` and `several`
    their values. `known` are the valid names, `example` is a value for the hint of an error.

    Raises:
        UsageError: if both flags are given, or a name is unknown.
    """
    flag, many = flags
    if one is not None and several is not None:
        raise UsageError(
            f"--{flag} {one} beside --{many} {several}; expected one of them",
            hint=f"--{many} {flag[0].upper()},… runs each layout with each of its {many}, "
            f"--{flag} {flag[0].upper()} with one",
        )
    if several is None:
        return [one]
    names = [name.strip() for name in several.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(
                f"--{many} names {name!r}; expected some of {', '.join(known)}",
                hint=f"for example --{many} {example}",
            )
    return names


def choose_exchanges(one: str | None, several: str | None) -> Sequence[str | None]:
    """Return the exchanges to run, from `--exchange` and `--exchanges`.

    An element `None` stands for the exchange that the script chooses.

    Raises:
        UsageError: if both flags are given, or an exchange is unknown.
    """
    flags = ("exchange", "exchanges")
    return _choose(flags, one, several, EXCHANGES.names(), "tree,shared-memory")


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
    flags = ("strategy", "strategies")
    strategies = _choose(flags, one, several, STRATEGIES.names(), "ddp,fsdp")
    if of_servers and None not in strategies and WITH_SERVERS not in strategies:
        flag, names = of_servers[0], one or several
        given = f"--strategy {one}" if several is None else f"--strategies {several}"
        raise UsageError(
            f"{flag} beside {given}, which knows no servers; expected {WITH_SERVERS}",
            hint=f"leave out {flag}; --strategies {names},{WITH_SERVERS} would use it for {WITH_SERVERS}",
        )
    return strategies
