"""Contestants that run at the same time and take turns: all ranks of one train, all others sleep.

So the rounds A B C A B C … cost no start of a process, and what disturbs the machine for a while
disturbs neighbouring turns of all contestants.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from contestants.turns import ADDRESS, SECONDS
from support import in_turns, mpiexec, one_thread, torchrun

_CONTESTANTS = Path(__file__).parent / "contestants"
_START_SECONDS = 300.0
_TURN_SECONDS = 600.0


@dataclass(frozen=True)
class Contestant:
    """A script of `contestants/` with its own arguments.

    Attributes:
        script: its name without `.py`.
        arguments: what it alone understands.
        records: whether it writes to a directory that it is told.
        launcher: whether it needs torchrun for a single rank, too.
        mpi: the MPI library whose `mpiexec` starts it instead of torchrun.
        environ: variables that it alone has.
    """

    script: str
    arguments: tuple[str, ...] = ()
    records: bool = False
    launcher: bool = False
    mpi: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)

    def command(self, n: int, words: Sequence[str]) -> list[str]:
        """Return the command that starts `n` ranks of it."""
        script = _CONTESTANTS / f"{self.script}.py"
        if self.mpi is not None:
            return mpiexec(self.mpi, n, script, *words)
        if n == 1 and not self.launcher:
            return [sys.executable, str(script), *words]
        return torchrun(n, script, *words)


@dataclass(frozen=True)
class Work:
    """What all contestants train; see `contestants/workload.py`."""

    model: str
    batch: int
    steps: int

    def arguments(self, epochs: int) -> list[str]:
        """Return the words that say so."""
        numbers = {"--batch": self.batch, "--steps": self.steps, "--epochs": epochs}
        words = [word for name, number in numbers.items() for word in (name, str(number))]
        return ["--model", self.model, *words]


class Team:
    """The processes of one contestant.

    Args:
        contestant: whose.
        n: how many.
        arguments: what all contestants are told.
        directory: where their socket and their output go; empty.
    """

    def __init__(
        self, contestant: Contestant, n: int, arguments: Sequence[str], directory: Path
    ) -> None:
        self._contestant, self._n, self._directory = contestant, n, directory
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(directory / "socket"))
        self._server.listen(n)
        self._ranks: list[socket.socket] = []
        words = [*contestant.arguments, *arguments]
        if contestant.records:
            words += ["--run-dir", str(directory / "run")]
        with (directory / "output").open("w") as output:
            self._process = subprocess.Popen(
                contestant.command(n, words),
                env={**one_thread(), **contestant.environ, ADDRESS: str(directory / "socket")},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
            )

    def meet(self) -> None:
        """Wait until every rank is there.

        Raises:
            RuntimeError: if they end before, or take too long.
        """
        self._server.settimeout(0.2)
        deadline = time.monotonic() + _START_SECONDS
        while len(self._ranks) < self._n:
            with contextlib.suppress(TimeoutError):
                connection, _ = self._server.accept()
                connection.settimeout(_TURN_SECONDS)
                self._ranks.append(connection)
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failure("did not start")

    def turn(self, case: int = 0) -> float:
        """Let all ranks do one turn; return the seconds of the slowest.

        Args:
            case: what is to be done, for contestants that do several things.

        Raises:
            RuntimeError: if one ends instead.
        """
        for rank in self._ranks:
            rank.sendall(bytes([case]))
        return max(self._hear(rank) for rank in self._ranks)

    def _hear(self, rank: socket.socket) -> float:
        try:
            answer = rank.recv(SECONDS.size, socket.MSG_WAITALL)
        except ConnectionResetError:
            answer = b""
        if len(answer) < SECONDS.size:
            raise self._failure("ended in its turn")
        seconds: float = SECONDS.unpack(answer)[0]
        return seconds

    def _failure(self, what: str) -> RuntimeError:
        time.sleep(1)  # for what is still being written
        tail = (self._directory / "output").read_text(errors="replace")[-4000:]
        return RuntimeError(f"{self._contestant} {what}:\n{tail}")

    def dismiss(self) -> None:
        """Tell all ranks that there are no more turns."""
        for rank in self._ranks:
            rank.close()

    def close(self) -> None:
        """Let the processes end: of themselves if they are done, otherwise by force."""
        self.dismiss()
        self._server.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # torchrun ends its ranks before it goes
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def gather_teams(
    contestants: Mapping[str, Contestant], n: int, arguments: Sequence[str]
) -> Iterator[dict[str, Team]]:
    """Start all contestants, wait until every rank is there, and end them after the body."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        teams = {}
        for number, (name, contestant) in enumerate(contestants.items()):
            directory = Path(place) / str(number)
            directory.mkdir()
            team = Team(contestant, n, arguments, directory)
            stack.callback(team.close)
            teams[name] = team
        for team in teams.values():
            team.meet()
        yield teams
        for team in teams.values():
            team.dismiss()  # so that all end at the same time


def compete(
    contestants: Mapping[str, Contestant], n: int, work: Work, pairs: int, *, warm_up: int = 2
) -> dict[str, list[float]]:
    """Return microseconds per step of every contestant in every round."""
    arguments = work.arguments(epochs=warm_up + pairs)
    with gather_teams(contestants, n, arguments) as teams:
        seconds = in_turns(
            {name: team.turn for name, team in teams.items()}, pairs, warm_up=warm_up
        )
    return {name: [1e6 * s / work.steps for s in turns] for name, turns in seconds.items()}


def consult(
    contestant: Contestant, n: int, arguments: Sequence[str], cases: Sequence[str], pairs: int
) -> dict[str, list[float]]:
    """Return the seconds of every case in every round, all of them done by one contestant."""
    places = {name: ("", number) for number, name in enumerate(cases)}
    return consult_all({"": contestant}, n, arguments, places, pairs)


def consult_all(
    contestants: Mapping[str, Contestant],
    n: int,
    arguments: Sequence[str],
    cases: Mapping[str, tuple[str, int]],
    pairs: int,
) -> dict[str, list[float]]:
    """Return the seconds of every case in every round.

    Args:
        contestants: who does them.
        n: number of ranks of each.
        arguments: what all contestants are told.
        cases: by name, whose case it is and which one of its own.
        pairs: rounds that count.
    """
    with gather_teams(contestants, n, arguments) as teams:
        turns = {name: partial(teams[who].turn, number) for name, (who, number) in cases.items()}
        return in_turns(turns, pairs, warm_up=3)
