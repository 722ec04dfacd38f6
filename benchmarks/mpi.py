"""Gradients over MPI: the sum alone and a whole DDP step, beside Gloo and shared memory.

No claim. On one host shared memory is there; what counts is whether `exchange="mpi"` is worth having
where ranks share none, beside Gloo.

Measured: the sum of 64 KB (many sums per turn) and of 32 MB, until it is back in the buffer; then one
epoch of 4 steps of ResNet-18 per turn, 8 images of 32x32 per rank and step. All contestants run at the
same time and take turns, one thread per rank; ranks that are not on their turn sleep. `MPI_Allreduce`
sums in an order of the library's own, `exchange=mpi` in tree order.
"""

from __future__ import annotations

from support import Report, options_parser
from teams import Contestant, Work, compete, consult_all

GLOO, SHARED = "all_reduce on Gloo", "Lockstep, shared-memory"
LIBRARIES = {"MPICH": "mpich", "Open MPI": "openmpi"}
WORK = Work("resnet18", batch=8, steps=4)
#: Kilobytes, and how many sums make a turn.
SIZES = {64: 100, 32_000: 2}

SUMMERS = {
    "torchrun": Contestant("exchanges", ("--exchanges", "gloo", "shared-memory", "tree")),
    **{
        name: Contestant("exchanges", ("--exchanges", "allreduce", "mpi"), mpi=library)
        for name, library in LIBRARIES.items()
    },
}
SUMS = {
    GLOO: ("torchrun", 0),
    SHARED: ("torchrun", 1),
    "Lockstep, tree on Gloo": ("torchrun", 2),
    **{f"{name}, MPI_Allreduce": (name, 0) for name in LIBRARIES},
    **{f"{name}, Lockstep, mpi": (name, 1) for name in LIBRARIES},
}

PLAIN = "plain DDP on Gloo"
STEPS = {
    PLAIN: Contestant("tensors_by_hand", ("--ddp",)),
    SHARED: Contestant("with_lockstep", ("--exchange", "shared-memory"), records=True),
    "Lockstep, tree on Gloo": Contestant("with_lockstep", ("--exchange", "tree"), records=True),
    **{
        f"{name}, plain DDP by MPI_Allreduce": Contestant(
            "tensors_by_hand", ("--ddp", "mpi"), mpi=library
        )
        for name, library in LIBRARIES.items()
    },
    **{
        f"{name}, Lockstep, mpi": Contestant(
            "with_lockstep", ("--exchange", "mpi"), records=True, mpi=library
        )
        for name, library in LIBRARIES.items()
    },
}


def main() -> None:
    parser = options_parser(__doc__, pairs=15)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    options = parser.parse_args()
    report = Report("Gradients over MPI", options.json)
    for n in options.ranks:
        for kilobytes, repeat in SIZES.items():
            arguments = ["--kilobytes", str(kilobytes), "--repeat", str(repeat)]
            seconds = consult_all(SUMMERS, n, arguments, SUMS, options.pairs)
            report.compare(
                f"one sum of {kilobytes:,} KB, {n} ranks",
                "ms",
                {name: [1e3 * value for value in values] for name, values in seconds.items()},
                reference=GLOO,
                digits=3 if kilobytes < 1000 else 1,
            )
    for n in options.ranks:
        rounds = compete(STEPS, n, WORK, options.pairs)
        report.compare(
            f"resnet18, a whole step, {n} ranks",
            "ms/step",
            {name: [value / 1e3 for value in values] for name, values in rounds.items()},
            reference=PLAIN,
            digits=1,
        )
    report.close()


if __name__ == "__main__":
    main()
