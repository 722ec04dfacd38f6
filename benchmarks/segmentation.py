"""A step of DeepLabV3 on two ranks, beside two processes that exchange nothing.

Claims: at least 0.97 of the steps per second of two processes that exchange nothing and load
nothing (`side by side`), and not slower than a hand-written loop with DistributedDataParallel.

`in step` exchanges nothing, either, and waits for the other rank after each step: what it takes longer
than `side by side` is the wait for the slower rank, which no exchange can avoid.

Two contestants separate the allocator from the rest. Lockstep's ranks keep the memory that a step frees,
and plain PyTorch gives it back. `side by side, memory kept` sets in plain PyTorch what Lockstep sets.
`Lockstep, not kept` leaves glibc's defaults.

Measured: crops of 129x129, 4 per rank and step, in memory; all contestants run at the same time and take
turns, one thread per rank. Lockstep logs the loss of every step.
"""

from __future__ import annotations

from support import Claim, Report, options_parser
from teams import Contestant, Work, compete

LOCKSTEP, DDP, LIMIT = "Lockstep", "hand-written DDP", "side by side"
#: What Lockstep sets in its ranks, as glibc's variables; with any such variable it sets nothing.
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
CONTESTANTS = {
    LIMIT: Contestant("tensors_by_hand", launcher=True),
    "side by side, memory kept": Contestant("tensors_by_hand", launcher=True, environ=KEPT),
    "in step": Contestant("tensors_by_hand", ("--barrier",), launcher=True),
    LOCKSTEP: Contestant("with_lockstep", records=True),
    "Lockstep, not kept": Contestant("with_lockstep", records=True, environ={"GLIBC_TUNABLES": ""}),
    DDP: Contestant("hand_written", launcher=True),
}
WORKS = {
    "deeplabv3_mobilenet_v3_large": Work("deeplabv3_mobilenet_v3_large", batch=4, steps=4),
    "deeplabv3_resnet50": Work("deeplabv3_resnet50", batch=4, steps=2),
}
CLAIMS = [
    Claim(LIMIT, LOCKSTEP, 0.97, at_most=False),
    Claim(DDP, LOCKSTEP, 1.0, at_most=False),
]


def main() -> None:
    parser = options_parser(__doc__, pairs=9)
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    options = parser.parse_args()
    report = Report("A step of DeepLabV3", options.json)
    for model in options.models:
        for n in options.ranks:
            rounds = compete(CONTESTANTS, n, WORKS[model], options.pairs)
            milliseconds = {name: [us / 1000 for us in turns] for name, turns in rounds.items()}
            report.compare(
                f"{model}, {n} ranks", "ms", milliseconds, reference=LIMIT, claims=CLAIMS
            )
    report.close()


if __name__ == "__main__":
    main()
