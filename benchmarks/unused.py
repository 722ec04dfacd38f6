"""What `find_unused_parameters` costs per step, which decides Lockstep's default.

Measured: like `step.py` on two ranks, Lockstep against itself with different settings of
DistributedDataParallel, all contestants running at the same time and taking turns.
"""

from __future__ import annotations

from support import Report, options_parser
from teams import Contestant, Work, compete

WORKS = {
    "mlp": Work("mlp", batch=32, steps=500),
    "resnet18": Work("resnet18", batch=16, steps=4),
}
SETTINGS = {
    "find_unused_parameters=False": ["find_unused_parameters=0"],
    "find_unused_parameters=True": ["find_unused_parameters=1"],
    "static_graph=True": ["find_unused_parameters=0", "static_graph=1"],
}


def contestant(words: list[str]) -> Contestant:
    """Return Lockstep with these settings of DistributedDataParallel."""
    arguments = [argument for word in words for argument in ("--ddp", word)]
    return Contestant("with_lockstep", tuple(arguments), records=True)


def main() -> None:
    parser = options_parser(__doc__, pairs=15)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    report = Report("Looking for unused parameters", options.json)
    contestants = {name: contestant(words) for name, words in SETTINGS.items()}
    for name, work in WORKS.items():
        rounds = compete(contestants, options.ranks, work, options.pairs)
        reference = "find_unused_parameters=False"
        report.compare(f"{name}, {options.ranks} ranks", "µs/step", rounds, reference=reference)
    report.close()


if __name__ == "__main__":
    main()
