"""From the SIGKILL of a worker to the next completed step: Lockstep, torchrun, torchft; two ranks.

Claim: at most 0.5 s for Lockstep, as the median of kills.

Measured: the network and the data of `examples/digits.py`. Each rank writes the time to a file when it
has done a step. Rank 1 is killed at a random moment, 5 s and more after the first step and after the
kill before; Lockstep's fork server has imported by then what the workers have. Beside it, kills within
the first second. Contestants take turns, each in a fresh launch.

- torchrun: DDP by hand with a checkpoint per epoch, `--max-restarts`. The generations meet under names
  of their own; without that, most restarts hang (see the contestant).
- torchft: two replica groups of one process. The survivor goes on alone, with half the batch, until the
  other has come back: the first table has its next step, the last one the next step of both.

"Beyond the newest before" is the first step that no process had completed before the kill: Lockstep
repeats steps since the newest snapshot, DDP by hand those since its checkpoint.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from disturbed import LOCKSTEP, TORCHFT, TORCHRUN, Contestant, Entry, Launch
from support import Report, options_parser

#: Within which a step that was under way at the kill may still be completed.
_UNDER_WAY = 0.1
_PATIENCE = 90.0
LIMIT = 0.5


@dataclass(frozen=True)
class Case:
    """When a contestant's rank 1 is killed.

    Attributes:
        contestant: who trains.
        calm: the least seconds of training before each kill.
        spread: a random part of as many seconds comes to that.
        kills: how many, in one launch.
    """

    contestant: Contestant
    calm: float = 5.0
    spread: float = 1.0
    kills: int = 1


EARLY = "Lockstep, killed in its first second"
CASES = {
    "Lockstep": Case(LOCKSTEP, kills=3),
    EARLY: Case(LOCKSTEP, calm=0.1, spread=0.9),
    "torchrun": Case(TORCHRUN, calm=3.0),
    "torchft": Case(TORCHFT, calm=3.0),
}


@dataclass(frozen=True)
class Recovery:
    """Seconds from a kill.

    Attributes:
        next: to the next completed step.
        beyond: to the first step that was not completed before.
        all: to the first such step of two ranks.
    """

    next: float
    beyond: float
    all: float


def recover(launch: Launch) -> Recovery:
    """Kill rank 1, and wait until the training goes on."""
    # Before the kill: a new process may begin while a step is under way.
    known = {entry.pid for entry in launch.look()}
    moment = launch.kill(1)
    if moment is None:
        raise RuntimeError(f"rank 1 has ended by itself:\n{launch.tail()}")
    time.sleep(_UNDER_WAY)
    before = list(launch.look())
    highest = max(entry.step for entry in before)

    def is_new(entry: Entry) -> bool:
        return entry.step > highest

    def is_next(entry: Entry) -> bool:
        # A replica group that is new may count its own steps from 1 before it has met the other.
        again = entry.step > 0 and entry.pid not in known and not launch.contestant.shrinks
        return again or is_new(entry)

    def is_whole(entry: Entry) -> bool:
        return is_new(entry) and entry.participants == 2

    found = [
        launch.wait_for(wanted, _PATIENCE, first=len(before)).time - moment
        for wanted in (is_next, is_new, is_whole)
    ]
    return Recovery(*found)


def launch_and_kill(case: Case, dice: random.Random) -> list[Recovery]:
    """Return what the kills of one launch cost."""
    found = []
    with tempfile.TemporaryDirectory() as place, Launch(case.contestant, Path(place)) as launch:
        for _ in range(case.kills):
            first = len(launch.look())
            launch.wait_for(lambda entry: entry.step > 0, _PATIENCE, first=first)
            time.sleep(case.calm + case.spread * dice.random())
            found.append(recover(launch))
    return found


def main() -> None:
    parser = options_parser(__doc__, pairs=7)
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument("--contestants", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    report = Report("SIGKILL of a worker to the next completed step", options.json)
    dice = random.Random(options.seed)  # noqa: S311 - nobody is to be kept from guessing
    rounds: dict[str, list[list[Recovery]]] = {name: [] for name in options.contestants}
    for _ in range(options.pairs):
        for name, found in rounds.items():
            found.append(launch_and_kill(CASES[name], dice))
    for heading, what in (
        ("next completed step", "next"),
        ("first step beyond the newest before", "beyond"),
        ("first such step of two ranks", "all"),
    ):
        seconds = {
            name: [[getattr(kill, what) for kill in kills] for kills in launches]
            for name, launches in rounds.items()
        }
        tell(report, heading, seconds, judged=what == "next")
    report.close()


def tell(
    report: Report, heading: str, seconds: dict[str, list[list[float]]], *, judged: bool
) -> None:
    """Print the medians of launches side by side, and below them the single kills."""
    medians = {
        name: [statistics.median(kills) for kills in launches] for name, launches in seconds.items()
    }
    reference = next(iter(medians))
    report.compare(f"2 ranks, {heading}", "s", medians, reference=reference, digits=2)
    rows = []
    for name, launches in seconds.items():
        single = [kill for kills in launches for kill in kills]
        row = [f"{statistics.median(single):.2f}", f"{min(single):.2f} to {max(single):.2f}"]
        rows.append([name, str(len(single)), *row])
    notes = []
    if judged and "Lockstep" in seconds:
        single = [kill for kills in seconds["Lockstep"] for kill in kills]
        middle = statistics.median(single)
        verdict = "holds" if middle <= LIMIT else "does not hold"
        notes = [f"Lockstep: {middle:.2f} s; claim: at most {LIMIT:.2f} s: {verdict}"]
    columns = ["contestant", "kills", "median s", "min to max"]
    report.table(f"{heading}, single kills", columns, rows, notes=notes)


if __name__ == "__main__":
    main()
