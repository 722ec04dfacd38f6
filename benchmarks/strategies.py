"""Every way to hold a model, on 1, 2 and 4 processes: speed, bytes on the wire, memory, exactness.

Claims: `ddp` is at least as fast as PyTorch's own DistributedDataParallel (1.0), and `fsdp` as its FSDP2
within noise (0.9). The rest of the table is for choosing.

Measured: training steps on one global batch of 32 images of 32x32 (ResNet-18), or of 64 vectors (a
perceptron of 10.5 million parameters), however many processes share it; one thread each, SGD with
momentum. All contestants run at the same time and take turns of a few steps. PyTorch's own are loops
written by hand that cut their batches out of tensors.

Bytes are counted by the kernel: what left through the loopback device in a turn, the servers' part
included, divided by steps and ranks. With `shared-memory` next to nothing does: each rank writes its
gradients to memory that the others read. Memory is the most that a rank used in a turn, above what it
had with torch imported, and without what belongs to files: model, gradients, optimizer, activations,
buffers of the exchange, a launcher's snapshots. Servers are no ranks; their memory is not in it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import Claim, Report, in_turns, options_parser
from teams import Contestant, Team, gather_teams

_SCRIPT = "with_strategy"
#: What a contestant is asked for in a turn; see `contestants/with_strategy.py`.
_TIME, _MEMORY, _CLASS = range(3)
_WARM_UP = 2
#: Samples of a global batch, and steps of a turn.
_WORKS = {"resnet18": (32, 2), "mlp": (64, 4)}
PLAIN, PLAIN_DDP, PLAIN_FSDP = "PyTorch, no wrapper", "PyTorch DDP", "PyTorch FSDP2"
SHARED, FSDP = "ddp, shared-memory", "fsdp"


@dataclass(frozen=True)
class Served(Contestant):
    """Workers and parameter servers, which `lockstep run` starts."""

    servers: int = 1

    def command(self, n: int, words: Sequence[str]) -> list[str]:
        """Return the command that starts `n` workers."""
        script = Path(__file__).parent / "contestants" / f"{self.script}.py"
        counts = ["-n", str(n), "--servers", str(self.servers), "--max-restarts", "0"]
        return [sys.executable, "-m", "lockstep", "run", *counts, str(script), *words]


def lockstep(way: str, *words: str) -> Contestant:
    """Return Lockstep with a strategy, started by torchrun as the others are."""
    return Contestant(_SCRIPT, ("--way", way, *words), records=True)


def contestants(model: str, n: int) -> dict[str, Contestant]:
    """Return who takes part on `n` processes."""
    if n == 1:
        return {
            PLAIN: Contestant(_SCRIPT, ("--way", "plain")),
            "single": lockstep("single"),
            "dp (no GPU here: the bare module)": lockstep("dp"),
        }
    served = ("--way", "ps")
    spread = {"pipeline": lockstep("pipeline")}
    if model == "mlp":  # its layers have a plan
        spread["tensor"] = lockstep("tensor", "--inexact")
    return {
        PLAIN_DDP: Contestant(_SCRIPT, ("--way", "plain-ddp")),
        "ddp, native": lockstep("ddp", "--exchange", "native", "--inexact"),
        "ddp, tree": lockstep("ddp", "--exchange", "tree"),
        SHARED: lockstep("ddp", "--exchange", "shared-memory"),
        "ps, 1 server": Served(_SCRIPT, served, records=True, servers=1),
        "ps, 2 servers": Served(_SCRIPT, served, records=True, servers=2),
        PLAIN_FSDP: Contestant(_SCRIPT, ("--way", "plain-fsdp")),
        FSDP: lockstep("fsdp"),
        **spread,
    }


@dataclass
class Counted:
    """A turn of one contestant, with the bytes that went through the loopback device.

    Attributes:
        team: its processes.
        bytes: of each turn.
    """

    team: Team
    bytes: list[int]

    def __call__(self) -> float:
        """Let the team do a timed turn; return its seconds."""
        before = _sent()
        seconds = self.team.turn(_TIME)
        self.bytes.append(_sent() - before)
        return seconds


def _sent() -> int:
    """Return how many bytes have left through the loopback device of this network namespace."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def measure(
    model: str, n: int, pairs: int, only: Sequence[str] | None
) -> tuple[dict[str, list[float]], list[list[str]]]:
    """Return samples per second of every contestant in every round, and the table's other columns."""
    batch, steps = _WORKS[model]
    words = ["--model", model, "--batch", str(batch), "--steps", str(steps)]
    chosen = {k: v for k, v in contestants(model, n).items() if only is None or k in only}
    with gather_teams(chosen, n, words) as teams:
        turns = {name: Counted(team, []) for name, team in teams.items()}
        seconds = in_turns(turns, pairs, warm_up=_WARM_UP)
        memory = {name: team.turn(_MEMORY) for name, team in teams.items()}
        classes = {name: team.turn(_CLASS) for name, team in teams.items()}
    speed = {name: [batch * steps / one for one in turn] for name, turn in seconds.items()}
    names = ("exact", "close", "approximate")
    rows = []
    for name, counted in turns.items():
        moved = statistics.median(counted.bytes[_WARM_UP:]) / steps / n
        known = names[int(classes[name])] if classes[name] >= 0 else "—"
        rows.append([f"{moved / 1e6:,.1f}", f"{memory[name] / 1e6:,.0f}", known])
    return speed, rows


def show(
    report: Report, heading: str, speed: Mapping[str, list[float]], rows: list[list[str]]
) -> None:
    """Print one table."""
    reference = next(iter(speed))
    columns = [
        "strategy",
        "samples/s",
        "min to max",
        f"÷ {reference}",
        "MB/step/rank",
        "MB/rank",
        "class",
    ]
    table = []
    for (name, values), row in zip(speed.items(), rows, strict=True):
        ratios = [a / b for a, b in zip(values, speed[reference], strict=True)]
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        ratio = f"{statistics.median(ratios):.2f}"
        table.append([name, f"{statistics.median(values):,.0f}", spread, ratio, *row])
    claims = [
        Claim(SHARED, PLAIN_DDP, 1.0, at_most=False),
        Claim(FSDP, PLAIN_FSDP, 0.9, at_most=False),
    ]
    verdicts = [claim.judge(speed) for claim in claims if {claim.a, claim.b} <= speed.keys()]
    report.table(f"{heading} ({len(speed[reference])} rounds)", columns, table, notes=verdicts)
    report.tables[-1]["rounds"] = {name: list(values) for name, values in speed.items()}


def main() -> None:
    parser = options_parser(__doc__, pairs=7)
    parser.add_argument("--models", nargs="+", choices=_WORKS, default=list(_WORKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="contestants, as the table names them"
    )
    options = parser.parse_args()
    report = Report("Strategies", options.json)
    for model in options.models:
        for n in options.ranks:
            speed, rows = measure(model, n, options.pairs, options.only)
            show(report, f"{model}, {n} process{'es' * (n > 1)}", speed, rows)
    report.close()


if __name__ == "__main__":
    main()
