"""Several hosts with several ranks each: bytes that leave a host per step, and the time of a step.

Claims: the exchange `tree` sends at most 1.1 times the limit, which is 2 (H - 1) / H times the gradients
from each of H hosts, and a step takes at most the time of plain DDP's; with 2 hosts of 4 ranks, at most
0.7 of it.

Measured: the hosts are network namespaces of this machine, and what leaves each of them passes a token
bucket (`tc … tbf rate 1gbit burst 64kb latency 50ms`). Ranks have one thread. The model is an MLP of
2.2 million parameters (9 MB) with one sample per rank, so that a step is mostly its exchange. `tree` and
`native` (Gloo's all-reduce) are started by `lockstep run`, plain DDP and Accelerate by torchrun; all take
turns, a launch each. `flat` is `tree` that takes each rank for a host, `direct` is `tree` without recursive
halving, which begins with 8 hosts. Bytes are those that leave the main
rank's interface, with all headers. Needs root.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support import Claim, Report, in_turns, one_thread, options_parser

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hosts import Host, Hosts, missing

SCRIPT = Path(__file__).parent / "contestants" / "over_hosts.py"
PLAIN = "plain DDP"
TREE = "tree"
#: Name of each contestant in the script that trains.
CONTESTANTS = {
    TREE: "tree",
    "flat": "flat",
    "direct": "direct",
    "native": "native",
    PLAIN: "ddp",
    "Accelerate": "accelerate",
}
#: Layouts, hosts x ranks of each, with the most that a step may take of plain DDP's time.
LAYOUTS = {"2x2": 1.0, "2x4": 0.7, "4x2": 1.0}
_TOLD = "told: "


def command(by: str, hosts: int, ranks: int, node: int, main: Host) -> list[str]:
    """Return the command that starts the ranks of one host."""
    if by in ("ddp", "accelerate"):
        run = ["torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node", str(ranks)]
        run += ["--node-rank", str(node), "--master-addr", main.address, "--master-port", "29500"]
    else:
        exchange = "native" if by == "native" else "tree"
        run = ["lockstep", "run", "--nnodes", str(hosts), "-n", str(ranks), "--exchange", exchange]
        run += ["--node-rank", str(node), "--master-addr", main.name]
    return [sys.executable, "-m", *run, str(SCRIPT), "--by", by]


def train(hosts: Hosts, made: list[Host], ranks: int, by: str) -> dict[str, Any]:
    """Train over the links, and return what the main rank tells."""
    with tempfile.TemporaryDirectory() as directory:
        started = [
            host.start(
                *command(by, len(made), ranks, node, made[0]),
                cwd=Path(directory),
                env={**one_thread(), "GLOO_SOCKET_IFNAME": "eth0"},
            )
            for node, host in enumerate(made)
        ]
        lines = hosts.finish(started, timeout=300)[0].out.splitlines()
    (line,) = (line for line in lines if _TOLD in line)
    told: dict[str, Any] = json.loads(line.partition(_TOLD)[2])
    return told


def compare(report: Report, layout: str, rate: str, pairs: int, names: list[str]) -> None:
    """Let the contestants take turns on one layout."""
    count, ranks = map(int, layout.split("x"))
    limit = 2 * (count - 1) / count
    told: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    with Hosts() as hosts:
        made = hosts.lan(count)
        for host in made:
            host.slow(rate)

        def contest(name: str) -> Callable[[], float]:
            def case() -> float:
                told[name].append(train(hosts, made, ranks, CONTESTANTS[name]))
                print(f"{layout} {name}: {told[name][-1]}", file=sys.stderr, flush=True)
                return float(told[name][-1]["milliseconds"])

            return case

        rounds = in_turns({name: contest(name) for name in names}, pairs, warm_up=0)
    most = LAYOUTS.get(layout, 1.0) if rate == "1gbit" else 1.0
    report.compare(
        f"a step, {count} hosts of {ranks} ranks, {rate}",
        "ms",
        rounds,
        reference=PLAIN if PLAIN in names else names[0],
        claims=[Claim(TREE, PLAIN, most, at_most=True)] if {TREE, PLAIN} <= {*names} else [],
    )
    rows = []
    for name, ours in told.items():
        models = [one["bytes"] / one["model"] for one in ours]
        middle = statistics.median(models)
        range_ = f"{min(models):.2f} to {max(models):.2f}"
        rows.append([name, f"{middle:.2f}", range_, f"{middle / limit:.2f}"])
    note = f"claim: {TREE} at most 1.10 times the limit of {limit:.2f}"
    columns = ["contestant", "median", "min to max", "÷ limit"]
    report.table(f"bytes that leave a host per step, in models, {layout}", columns, rows, [note])


def main() -> None:
    parser = options_parser(__doc__, pairs=3)
    parser.add_argument("--rate", default="1gbit", help="of the links, in the words of tc")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="hosts x ranks of each")
    here = [name for name in CONTESTANTS if name != "direct"]
    here = [name for name in here if name != "Accelerate" or find_spec("accelerate")]
    parser.add_argument("--contestants", default=",".join(here), help="some of these")
    options = parser.parse_args()
    report = Report("Several hosts", options.json)
    if (reason := missing()) is not None:
        print(f"\nskipped: {reason}", flush=True)
        return
    for layout in options.layouts.split(","):
        compare(report, layout, options.rate, options.pairs, options.contestants.split(","))
    report.close()


if __name__ == "__main__":
    main()
