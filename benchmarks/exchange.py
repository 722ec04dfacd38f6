"""How gradients meet: a whole DDP step with each exchange, and the sum alone.

Claim: with the exact exchange a step of ResNet-18 takes at most as long as with plain DDP on Gloo.

Measured: one epoch of 4 steps per turn, 8 images of 32x32 per rank and step, all contestants
running at the same time and taking turns, one thread per rank. Plain DDP is a loop written by hand
that cuts its batches out of tensors, so that only the exchange and Lockstep's own work differ.
The sum alone: 25 MB, in one set of processes, until the sum is back in the buffer.
"""

from __future__ import annotations

from support import Claim, Report, options_parser
from teams import Contestant, Work, compete, consult

PLAIN = "plain DDP on Gloo"
SHARED = "Lockstep, shared-memory"
WORK = Work("resnet18", batch=8, steps=4)
CONTESTANTS = {
    PLAIN: Contestant("tensors_by_hand", ("--ddp",)),
    SHARED: Contestant("with_lockstep", ("--exchange", "shared-memory"), records=True),
    "Lockstep, tree": Contestant("with_lockstep", ("--exchange", "tree"), records=True),
    "Lockstep, native": Contestant(
        "with_lockstep", ("--exchange", "native", "--inexact"), records=True
    ),
}

#: The sum alone: names in the table, and in `contestants/exchanges.py`.
SUMS = {
    "all_reduce on Gloo": "gloo",
    "shared-memory": "shared-memory",
    "tree": "tree",
    "native": "native",
}


def main() -> None:
    parser = options_parser(__doc__, pairs=15)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--megabytes", type=int, default=25, help="of the buffer to sum alone")
    options = parser.parse_args()
    report = Report("How gradients meet", options.json)
    for n in options.ranks:
        rounds = compete(CONTESTANTS, n, WORK, options.pairs)
        milliseconds = {name: [value / 1e3 for value in values] for name, values in rounds.items()}
        report.compare(
            f"resnet18, a whole step, {n} ranks",
            "ms/step",
            milliseconds,
            reference=PLAIN,
            claims=[Claim(SHARED, PLAIN, 1.0, at_most=True)],
            digits=1,
        )
    for n in options.ranks:
        size = str(1000 * options.megabytes)
        arguments = ["--kilobytes", size, "--exchanges", *SUMS.values()]
        seconds = consult(Contestant("exchanges"), n, arguments, list(SUMS), 2 * options.pairs)
        report.compare(
            f"one sum of {options.megabytes} MB, {n} ranks",
            "ms",
            {name: [1e3 * value for value in values] for name, values in seconds.items()},
            reference="all_reduce on Gloo",
            digits=1,
        )
    report.close()


if __name__ == "__main__":
    main()
