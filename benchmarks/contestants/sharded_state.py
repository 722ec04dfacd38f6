"""A sharded model whose ranks note how much host memory snapshots, a checkpoint and a digest take.

    sharded_state.py DIRECTORY LAYERS WIDTH STEPS

Each rank leaves `rank-K.json` in DIRECTORY: the most that its resident memory grew by, in bytes, while it
took a snapshot, while a checkpoint was copied and written, and while the digest was computed; and the size
of the launcher's memory.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.recovery.checkpointing import StateSaver
from lockstep.state.checkpoint import dcp
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.state.checkpoint.snapshot import Snapshots

PLACE, *NUMBERS = sys.argv[1:]
LAYERS, WIDTH, STEPS = map(int, NUMBERS)
_M_MMAP_THRESHOLD = -3
PEAKS: dict[str, int] = {}
_taken: list[int] = []


def status(name: str) -> int:
    """Return a line of the process's status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


@contextlib.contextmanager
def measured(what: str) -> Iterator[None]:
    """Note by how much resident memory grows inside."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free and resident would hide what is taken
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is now
    before = status("VmRSS")
    yield
    PEAKS[what] = max(PEAKS.get(what, 0), status("VmHWM") - before)


def watch_snapshots() -> None:
    """Measure each point of the run at which a snapshot is taken."""
    at_point, write = StateSaver.at_point, Snapshots.write

    def watched_point(keeper: StateSaver) -> None:
        count = len(_taken)
        with measured("point"):
            at_point(keeper)
        grown = PEAKS.pop("point")
        if len(_taken) > count:
            PEAKS["snapshot"] = max(PEAKS.get("snapshot", 0), grown)

    def watched_write(snapshots: Snapshots, *arguments: Any) -> None:
        _taken.append(1)
        write(snapshots, *arguments)

    StateSaver.at_point = watched_point  # type: ignore[method-assign]
    Snapshots.write = watched_write  # type: ignore[method-assign]


def main() -> None:
    watch_snapshots()
    dcp.load_dcp()
    descriptors = Descriptors.find(os.environ)
    with lockstep.Run("sharded-state") as run:
        # Tensors in pages of their own, which go with them: no peak is hidden by memory that is free.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        model = run.model(nn.Sequential(*layers()))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        data = run.loader(TensorDataset(torch.randn(STEPS * 4, WIDTH)), batch_size=4)
        for (x,) in data:
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.1)
        with measured("checkpoint"):
            run.save()
            run._session._checkpointing._checkpoints.wait()
        with measured("digest"):
            run.digest()
        rank = run.world.rank
    memory = 0 if descriptors is None else sum(os.fstat(d).st_size for d in descriptors.buffers)
    told = {**PEAKS, "launcher": memory, "snapshots": len(_taken)}
    Path(PLACE, f"rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


def layers() -> list[nn.Module]:
    """Return the model's layers, a unit each."""
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]


main()
