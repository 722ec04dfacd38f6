"""Opening a shuffled epoch: Lockstep's keyed order against drawing a whole permutation.

Claim: a shuffled epoch of 10^9 indices opens in constant memory.

Measured: every line in a process of its own: seconds until the first batch, by how much the peak
of resident memory grew, and the cost of one index when many are asked for. `DistributedSampler` is
what a hand-written loop uses; it makes a list of Python integers.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path

from support import Report, in_turns, one_thread, options_parser, run_quietly

SCRIPT = Path(__file__).parent / "contestants" / "orders.py"
LENGTHS = {
    "Lockstep's order": (10**6, 10**9, 10**12),
    "run.loader": (10**6, 10**9),
    "torch.randperm": (10**6, 10**8),
    "DistributedSampler": (10**6, 10**7),
}


def measure(kind: str, length: int) -> dict[str, float]:
    """Return what one process measures."""
    command = [sys.executable, str(SCRIPT), kind, str(length)]
    found: dict[str, float] = json.loads(run_quietly(command, env=one_thread()).splitlines()[-1])
    return found


def main() -> None:
    options = options_parser(__doc__, pairs=3).parse_args()
    report = Report("Opening a shuffled epoch", options.json)
    cases = {
        (kind, length): partial(measure, kind, length)
        for kind, lengths in LENGTHS.items()
        for length in lengths
    }
    rounds = in_turns(cases, options.pairs, warm_up=0)
    rows = []
    for (kind, length), values in rounds.items():
        middle = {key: statistics.median(v[key] for v in values) for key in values[0]}
        first, memory, each = middle["first"], middle["memory"], middle["each"]
        rows.append(
            [
                kind,
                f"10^{len(str(length)) - 1}",
                f"{1e3 * first:,.2f}",
                f"{memory:,.1f}",
                f"{1e9 * each:,.0f}",
            ]
        )
    columns = ["order", "indices", "ms to first batch", "MB grown", "ns per index"]
    report.table(f"medians of {options.pairs} rounds", columns, rows)
    report.close()


if __name__ == "__main__":
    main()
