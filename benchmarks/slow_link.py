"""Two hosts joined by 100 Mbit/s: how long until 97 % of the digits are right, by exchange.

Claim: with local SGD it takes at most half as long as with plain DDP.

Measured: the hosts are network namespaces of this machine, and what leaves each of them passes a token
bucket (`tc … tbf rate 100mbit burst 64kb latency 50ms`). Each has one rank with one thread, started by
`lockstep run --nnodes 2`, and the exchanges take turns, a launch each. The model is an MLP of
2.2 million parameters, the optimizer SGD with momentum 0.9, the global batch 64. The time is from the first
batch to the evaluation, one after every epoch, that finds 97 %. Bytes are those that leave the main rank's
interface. DiLoCo trains with a smaller learning rate: its outer momentum makes more of it. Needs root.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import Claim, Report, in_turns, one_thread, options_parser

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hosts import Host, Hosts, missing

SCRIPT = Path(__file__).parent / "contestants" / "over_link.py"
PLAIN = "plain DDP (tree)"
LOCAL = "local-sgd, every 16 steps"
#: Name, flags, learning rate.
CONTESTANTS = {
    PLAIN: (("--exchange", "tree"), "0.1"),
    "bf16": (("--exchange", "bf16"), "0.1"),
    "powersgd, rank 4": (("--exchange", "powersgd"), "0.1"),
    LOCAL: (("--strategy", "local-sgd", "--sync-every", "16"), "0.1"),
    "diloco, every 50 steps": (("--strategy", "diloco", "--sync-every", "50"), "0.03"),
}
_TOLD = "told: "


def train(hosts: Hosts, made: list[Host], flags: tuple[str, ...], lr: str) -> dict[str, Any]:
    """Train over the link, and return what the main rank tells."""
    script = (str(SCRIPT), "--lr", lr, "--interface", "eth0")
    with tempfile.TemporaryDirectory() as directory:
        place = ("--nnodes", "2", "-n", "1", "--master-addr", made[0].name)
        started = [
            host.start(
                *(sys.executable, "-m", "lockstep", "run", *place, "--node-rank", str(rank)),
                *("--no-exact", *flags, *script),
                cwd=Path(directory),
                env=one_thread(),
            )
            for rank, host in enumerate(made)
        ]
        lines = hosts.finish(started, timeout=900)[0].out.splitlines()
    (line,) = (line for line in lines if line.startswith(_TOLD))
    told: dict[str, Any] = json.loads(line.removeprefix(_TOLD))
    return told


def main() -> None:
    parser = options_parser(__doc__, pairs=3)
    parser.add_argument("--rate", default="100mbit", help="of the link, in the words of tc")
    options = parser.parse_args()
    report = Report("A slow link", options.json)
    if (reason := missing()) is not None:
        print(f"\nskipped: {reason}", flush=True)
        return
    told: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    with Hosts() as hosts:
        made = hosts.lan(2)
        for host in made:
            host.slow(options.rate)

        def contest(name: str) -> Callable[[], float]:
            def case() -> float:
                told[name].append(train(hosts, made, *CONTESTANTS[name]))
                print(f"{name}: {told[name][-1]}", file=sys.stderr, flush=True)
                return float(told[name][-1]["seconds"])

            return case

        cases = {name: contest(name) for name in CONTESTANTS}
        rounds = in_turns(cases, options.pairs, warm_up=0)
    report.compare(
        f"time to 97 % of the digits, 2 hosts, {options.rate}",
        "s",
        rounds,
        reference=PLAIN,
        claims=[Claim(LOCAL, PLAIN, 0.5, at_most=True)],
        digits=1,
    )
    rows = [
        [
            name,
            f"{statistics.median(one['bytes'] for one in ours) / 1e6:.2f}",
            f"{statistics.median(one['steps'] for one in ours):.0f}",
            f"{statistics.median(one['accuracy'] for one in ours):.1%}",
        ]
        for name, ours in told.items()
    ]
    columns = ["exchange or strategy", "MB sent per step and rank", "steps", "accuracy at the end"]
    report.table("what it took", columns, rows)
    report.close()


if __name__ == "__main__":
    main()
