"""Time of a training step: Lockstep against a loop written by hand, and against its peers.

Claims: never slower than a hand-written loop (DistributedSampler, DataLoader, DDP) beyond noise
(1.02); at least 1.3 times faster on an in-memory dataset; faster than Accelerate, Fabric, Ignite.

Measured: one epoch per turn, all contestants running at the same time and taking turns, one thread
per rank. An epoch of the MLP 64-64-10 has 500 steps of 32 samples per rank, one of ResNet-18 on
32x32 images 4 steps of 16. Lockstep logs the loss of every step, the others log nothing.
`tensors by hand` uses no loader at all: what nobody's loop can beat by much.
"""

from __future__ import annotations

from support import Claim, Report, options_parser
from teams import Contestant, Work, compete

LOCKSTEP = "Lockstep"
HAND = "hand-written DDP"
PEERS = {
    "Accelerate": Contestant("with_accelerate"),
    "Fabric": Contestant("with_fabric"),
    "Ignite": Contestant("with_ignite"),
}
WORKS = {
    "mlp": Work("mlp", batch=32, steps=500),
    "resnet18": Work("resnet18", batch=16, steps=4),
}


def contestants(n: int) -> dict[str, Contestant]:
    """Return who takes part on `n` ranks."""
    bare = {"tensors by hand, DDP": Contestant("tensors_by_hand", ("--ddp",), launcher=True)}
    if n == 1:
        bare["tensors by hand, no DDP"] = Contestant("tensors_by_hand")
        bare["hand-written, no DDP"] = Contestant("one_process")
    return {
        LOCKSTEP: Contestant("with_lockstep", records=True),
        HAND: Contestant("hand_written", launcher=True),
        **PEERS,
        **bare,
    }


def claims(model: str) -> list[Claim]:
    """Return what is claimed for `model`."""
    found = [Claim(LOCKSTEP, HAND, 1.02, at_most=True)]
    if model == "mlp":
        found.append(Claim(HAND, LOCKSTEP, 1.3, at_most=False))
    return found + [Claim(peer, LOCKSTEP, 1.0, at_most=False) for peer in PEERS]


def main() -> None:
    parser = options_parser(__doc__, pairs=15)
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    report = Report("Time of a training step", options.json)
    for model in options.models:
        for n in options.ranks:
            rounds = compete(contestants(n), n, WORKS[model], options.pairs)
            heading = f"{model}, {n} rank{'s' * (n > 1)}"
            report.compare(heading, "µs/step", rounds, reference=LOCKSTEP, claims=claims(model))
    report.close()


if __name__ == "__main__":
    main()
