"""Goodput: undisturbed time over disturbed time for the same committed steps; two ranks, steps of 2 s.

Claims, the ratios of torchft's own report: at least 85 % with a kill every 5.5 step times, at least
55 % with one every 1.4. A kill loses half a step on average, so that about 91 % and 71 % are the limits.

Measured: from the end of one step to that of another. A step sleeps, and trains the digits
for some milliseconds. A seed draws who is killed and when: times between kills are exponential, scaled
so that as many as the undisturbed run would see have the mean that is said. A kill that comes while its
victim is not there waits for it. Lockstep is told `--max-restarts 100`: its default, three in a row
without a step between them, is too few for the denser storm.

torchft, beside it: two replica groups, the survivor goes on alone. A step counts when any group has
committed it, with half its batch, too; the table says how many steps were whole.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from disturbed import LOCKSTEP, TORCHFT, Contestant, Launch
from support import Claim, Report, options_parser, round_ratios

CONTESTANTS = {"Lockstep": LOCKSTEP, "torchft": TORCHFT}
#: Step times between kills, and what is claimed for Lockstep.
PACES = {5.5: 0.85, 1.4: 0.55}
#: Seconds of calm before the first step that counts: runs are not killed as soon as they begin.
_CALM = 5.0
#: Times as long as without kills, after which a contestant is given up: what it has done counts.
_PATIENCE = 5


def draw(mean: float, seconds: float, dice: random.Random) -> list[tuple[float, int]]:
    """Return when whom to kill, `mean` seconds apart: whatever happens in `seconds`, and far beyond."""
    count = max(1, math.ceil(seconds / mean))
    kills, moment = [], 0.0
    for _ in range(_PATIENCE):
        gaps = [dice.expovariate(1.0) for _ in range(count)]
        for gap in gaps:
            moment += gap * mean * count / sum(gaps)
            kills.append((moment, dice.randrange(2)))
    return kills


class Killer(threading.Thread):
    """Kills at the drawn moments, from its start until it is told to stop."""

    def __init__(self, launch: Launch, kills: Sequence[tuple[float, int]]) -> None:
        super().__init__(daemon=True)
        self._launch, self._kills = launch, kills
        self._over = threading.Event()
        self.killed = 0

    def run(self) -> None:
        """Kill, as the thread that this is."""
        began = time.monotonic()
        for moment, rank in self._kills:
            if self._over.wait(max(0.0, began + moment - time.monotonic())):
                return
            while self._launch.kill(rank) is None:
                if self._over.wait(0.005):
                    return
            self.killed += 1

    def stop(self) -> None:
        """Kill no more."""
        self._over.set()
        self.join()


@dataclass(frozen=True)
class Outcome:
    """What came of a launch.

    Attributes:
        seconds: per step.
        killed: how many were killed.
        whole: part of the steps that both ranks did.
    """

    seconds: float
    killed: int
    whole: float


def measure(
    contestant: Contestant, steps: int, *, step: float, kills: Sequence[tuple[float, int]]
) -> Outcome:
    """Let a contestant do `steps` steps, of `step` seconds, under `kills`."""
    words = ["--step-seconds", str(step)]
    with tempfile.TemporaryDirectory() as place, Launch(contestant, Path(place), words) as launch:
        limit = 60.0 + _PATIENCE * steps * step
        first = launch.wait_for(lambda entry: entry.step > 0, limit)
        begin = launch.wait_for(lambda entry: entry.time > first.time + _CALM, limit)
        killer = Killer(launch, kills)
        killer.start()
        try:
            last = launch.wait_for(lambda entry: entry.step >= begin.step + steps, limit)
        except TimeoutError:  # what it has done until then is its goodput
            last = max(launch.entries, key=lambda entry: entry.step)
        finally:
            killer.stop()
        done = last.step - begin.step
        counted = range(begin.step + 1, last.step + 1)
        whole = {e.step for e in launch.entries if e.participants == 2 and e.step in counted}
    if done < steps:
        return Outcome(limit / done if done else math.inf, killer.killed, len(whole) / max(1, done))
    return Outcome((last.time - begin.time) / done, killer.killed, len(whole) / done)


def main() -> None:
    parser = options_parser(__doc__, pairs=3)
    parser.add_argument("--steps", type=int, default=20, help="steps that count, with kills")
    parser.add_argument("--step-seconds", type=float, default=2.0, help="to shrink it all")
    parser.add_argument("--seed", type=int, default=0, help="draws the kills")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    options = parser.parse_args()
    report = Report("Goodput under kills", options.json)
    dice = random.Random(options.seed)  # noqa: S311 - nobody is to be kept from guessing
    seconds = options.steps * options.step_seconds
    calm: dict[str, list[Outcome]] = {name: [] for name in options.contestants}
    rough = {pace: {name: [] for name in options.contestants} for pace in PACES}
    for _ in range(options.pairs):
        storms = {pace: draw(pace * options.step_seconds, seconds, dice) for pace in PACES}
        for name, found in calm.items():
            run = partial(measure, CONTESTANTS[name], step=options.step_seconds)
            found.append(run(max(1, options.steps // 2), kills=()))
            for pace, kills in storms.items():
                rough[pace][name].append(run(options.steps, kills=kills))
    for pace, least in PACES.items():
        heading = f"steps of {options.step_seconds} s, a kill every {pace} step times"
        tell(report, f"{heading} ({options.pairs} rounds)", calm, rough[pace], least)
    report.close()


def tell(
    report: Report,
    heading: str,
    calm: dict[str, list[Outcome]],
    rough: dict[str, list[Outcome]],
    least: float,
) -> None:
    """Print goodputs, and judge that of Lockstep."""
    rows, rounds = [], {}
    for name, outcomes in calm.items():
        undisturbed = [outcome.seconds for outcome in outcomes]
        disturbed = [outcome.seconds for outcome in rough[name]]
        rounds |= {f"{name}, undisturbed": undisturbed, f"{name}, disturbed": disturbed}
        goodputs = round_ratios(undisturbed, disturbed)
        rows.append(
            [
                name,
                f"{statistics.median(undisturbed):.2f}",
                f"{statistics.median(disturbed):.2f}",
                f"{statistics.median(goodputs):.1%}",
                f"{min(goodputs):.1%} to {max(goodputs):.1%}",
                " ".join(str(outcome.killed) for outcome in rough[name]),
                f"{statistics.mean(outcome.whole for outcome in rough[name]):.0%}",
            ]
        )
    columns = ["contestant", "s/step undisturbed", "disturbed", "goodput", "min to max", "kills"]
    claim = Claim("Lockstep, undisturbed", "Lockstep, disturbed", least, at_most=False)
    notes = [claim.judge(rounds)] if "Lockstep" in calm else []
    report.table(heading, [*columns, "steps of both ranks"], rows, notes=notes)
    report.tables[-1]["rounds"] = rounds


if __name__ == "__main__":
    main()
