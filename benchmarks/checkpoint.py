"""How long a checkpoint keeps the training waiting: a model of 250 MB with Adam, 750 MB in all.

Claim: at most 5 % of a synchronous `torch.save` with fsync of the same state.

Measured: 16 linear layers, one thread per rank, on one rank and on two. The stall is what the training
thread spends in saving: it copies its rank's part of the state, and a thread writes it. It is measured
around that call, and as the time of the step with `run.save` beyond the median of the steps before. By
hand, rank 0 writes and the others wait. The second table has the steps while a checkpoint is written:
writing takes processor time and memory bandwidth from them, which a stall doesn't show.

The first save of a run is told apart: in its 50th step a run takes the memory for copies, in the
background; before that, the first save takes it itself.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from support import Claim, Report, one_thread, options_parser, run_quietly, torchrun

SCRIPT = Path(__file__).parent / "contestants" / "saving.py"
STALL, STEP = "run.save, around the call", "run.save, beyond a step without"
HAND = "torch.save + fsync"
LIMIT = 0.05
#: Steps before the first save: late enough for its memory to be there, and not.
LATE, EARLY = 56, 3

Times = dict[str, list[float]]


def measure(n: int, before: int, rounds: int, layers: int) -> Times:
    """Return what `contestants/saving.py` on `n` ranks has measured."""
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "times.json"
        words = [str(found), str(before), str(rounds), str(layers)]
        alone = [sys.executable, str(SCRIPT), *words]
        command = torchrun(n, SCRIPT, *words) if n > 1 else alone
        run_quietly(command, timeout=900, env=one_thread(), cwd=place)
        times: Times = json.loads(found.read_text(encoding="utf-8"))
        return times


def stalls(times: Times) -> list[float]:
    """Return how much longer each step with a save was than the plain ones."""
    usual = statistics.median(times["plain"])
    return [max(0.0, step - usual) for step in times["save"]]


def tell_stalls(report: Report, heading: str, times: Times) -> None:
    """Print the saves after the first beside those by hand."""
    rounds = {
        HAND: times["hand"][1:],
        STALL: times["stage"][1:],
        STEP: stalls(times)[1:],
    }
    claims = [Claim(STALL, HAND, LIMIT, at_most=True), Claim(STEP, HAND, LIMIT, at_most=True)]
    report.compare(heading, "s", rounds, reference=HAND, claims=claims, digits=3)
    report.tables[-1]["times"] = times


def tell_others(report: Report, heading: str, late: Times, early: Times) -> None:
    """Print first saves, and what writing does to the steps."""
    rows = [
        _row("step without a checkpoint", late["plain"]),
        _row("step while one is written", late["beside"]),
        _row("writing one, in the background", late["written"]),
        _row(f"first save, in step {LATE + 1}", late["stage"][:1]),
        _row(f"first save, in step {EARLY + 1}", early["stage"][:1]),
    ]
    slower = statistics.median(late["beside"]) / statistics.median(late["plain"])
    note = f"steps while a checkpoint is written take {slower:.2f} times as long"
    report.table(heading, ["what", "times", "median s", "min to max"], rows, notes=[note])


def _row(name: str, values: list[float]) -> list[str]:
    middle = f"{statistics.median(values):.3f}"
    return [name, str(len(values)), middle, f"{min(values):.3f} to {max(values):.3f}"]


def main() -> None:
    parser = options_parser(__doc__, pairs=7)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layers", type=int, default=16, help="of 15.6 MB each")
    options = parser.parse_args()
    report = Report("The stall of a checkpoint", options.json)
    for n in options.ranks:
        late = measure(n, LATE, options.pairs, options.layers)
        early = measure(n, EARLY, 0, options.layers)
        ranks = f"{n} rank{'s' * (n > 1)}"
        tell_stalls(report, f"{ranks}, each save after the first", late)
        tell_others(report, f"{ranks}, beside it", late, early)
    report.close()


if __name__ == "__main__":
    main()
