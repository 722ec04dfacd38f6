"""Host memory that the state of a sharded model takes: a model of 400 MB with AdamW, `strategy=fsdp`.

Claim: a snapshot, and a checkpoint, take at most a rank's share of the state and one unit.

Measured: the model has 24 layers of 2048 x 2048, a unit each, so that its state with AdamW has 1.2 GB. Each
rank resets the peak of its resident memory, takes a snapshot, or saves and waits until that is on disk, and
notes by how much the peak is above what was resident before. A unit is counted with its optimizer's state.
Memory of the launcher, which holds two snapshots, is counted where a rank touches it, and told apart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from support import Report, one_thread, options_parser, run_quietly

SCRIPT = Path(__file__).parent / "contestants" / "sharded_state.py"
#: Parameters, and the two averages of AdamW.
_COPIES = 3 * 4
WHAT = ("snapshot", "checkpoint", "digest")


def measure(n: int, layers: int, width: int, steps: int) -> list[dict[str, int]]:
    """Return what each of `n` ranks has noted."""
    with tempfile.TemporaryDirectory() as place:
        run = [sys.executable, "-m", "lockstep", "run", "-n", str(n), "--strategy", "fsdp"]
        words = [place, str(layers), str(width), str(steps)]
        command = [*run, "--checkpoint-every", "0", str(SCRIPT), "--", *words]
        run_quietly(command, timeout=900, env=one_thread(), cwd=place)
        files = [Path(place, f"rank-{rank}.json") for rank in range(n)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def tell(report: Report, n: int, found: list[dict[str, int]], layers: int, width: int) -> None:
    """Print what the ranks have noted, and whether the claim holds."""
    unit = width * width * _COPIES
    share = layers * unit // n
    rows = []
    for what in WHAT:
        most = max(one[what] for one in found)
        holds = "yes" if most <= share + unit else "no"
        rows.append([what, f"{most / 1e6:,.0f}", f"{(share + unit) / 1e6:,.0f}", holds])
    launcher = found[0]["launcher"] / 1e6
    notes = [
        f"share {share / 1e6:,.0f} MB, unit {unit / 1e6:,.0f} MB",
        f"the launcher's memory: {launcher:,.0f} MB, {launcher / n:,.0f} MB for each rank",
        f"{found[0]['snapshots']} snapshots",
    ]
    report.table(f"{n} ranks", ["what", "most MB", "share + unit", "holds"], rows, notes=notes)
    report.tables[-1]["ranks"] = found


def main() -> None:
    parser = options_parser(__doc__, pairs=1)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    report = Report("The state of a sharded model in host memory", options.json)
    for n in options.ranks:
        found = measure(n, options.layers, options.width, options.steps)
        tell(report, n, found, options.layers, options.width)
    report.close()


if __name__ == "__main__":
    main()
