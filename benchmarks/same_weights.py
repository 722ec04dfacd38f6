"""Whether one and two ranks give the same weights: Lockstep, DDP, Accelerate and Fabric on one training.

The scripts are those of `examples/migrate`: the same model, data, seed and global batch on both numbers of
ranks, one thread per rank. Printed is the SHA-256 of the final weights. Each script runs twice on one rank,
since one that then gives different weights says nothing about ranks.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

from support import options_parser

HERE = Path(__file__).parent
SCRIPTS = HERE.parent / "examples/migrate"
CONTESTANTS = {
    "Lockstep": ("with_lockstep", "lockstep run -n"),
    "DDP": ("with_ddp", "torch.distributed.run --standalone --nproc-per-node"),
    "Accelerate": ("with_accelerate", "torch.distributed.run --standalone --nproc-per-node"),
    "Fabric": ("with_fabric", ""),
}


def digest(name: str, launcher: str, ranks: int) -> str:
    """Run a script and return the digest that its first rank prints."""
    words = f"-m {launcher} {ranks}".split() if launcher else []
    fabric = {"LT_ACCELERATOR": "cpu", "LT_STRATEGY": "ddp", "LT_DEVICES": str(ranks)}
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"} | fabric
    done = subprocess.run(
        [sys.executable, *words, __file__, name],
        cwd=SCRIPTS,
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("weights "))
    return line.split()[1]


def train(name: str) -> None:
    """Run a script in this process, and print the digest of its model on the first rank."""
    sys.path.insert(0, str(SCRIPTS))
    model = runpy.run_path(str(SCRIPTS / f"{name}.py"))["model"]
    bits = b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print("weights", hashlib.sha256(bits).hexdigest()[:16], flush=True)


def main() -> None:
    options = options_parser(__doc__, pairs=1).parse_args()
    print(f"{'':12}{'1 rank':20}{'1 rank again':20}2 ranks")
    for _ in range(options.pairs):
        for title, (name, launcher) in CONTESTANTS.items():
            found = [digest(name, launcher, ranks) for ranks in (1, 1, 2)]
            verdict = "same" if len(set(found)) == 1 else "not the same"
            print(f"{title:12}{''.join(f'{one:20}' for one in found)}{verdict}", flush=True)


if __name__ == "__main__":
    names = [name for name, _ in CONTESTANTS.values()]
    train(sys.argv[1]) if sys.argv[1:2] and sys.argv[1] in names else main()
