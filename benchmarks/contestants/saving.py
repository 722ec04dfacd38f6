"""A model that is large for its steps, saved by Lockstep and by `torch.save`; writes what that took.

    saving.py FILE BEFORE ROUNDS LAYERS

BEFORE steps come before the first save. A round is: plain steps, one with `run.save`, steps while that
is written, and `torch.save` with fsync on rank 0 while the others wait.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.state.checkpoint.manager import CheckpointManager
from lockstep.state.checkpoint.writer import CheckpointWriter

FILE, *NUMBERS = sys.argv[1:]
BEFORE, ROUNDS, LAYERS = map(int, NUMBERS)
#: A layer has 15.6 MB.
WIDTH = 1976
ROUND = ["plain"] * 6 + ["save"] + ["beside"] * 8 + ["hand"]


class Times:
    """What took how long, and who writes when."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {
            name: [] for name in ("plain", "stage", "save", "beside", "written", "hand")
        }
        self.checkpoints: CheckpointManager | None = None
        self._writing = (0.0, 0.0)
        self._watch_save()
        self._watch_writing()

    def _watch_save(self) -> None:
        save = CheckpointManager.save

        def timed(checkpoints: CheckpointManager, *arguments: Any, **more: Any) -> None:
            self.checkpoints = checkpoints
            began = time.perf_counter()
            save(checkpoints, *arguments, **more)
            self.seconds["stage"].append(time.perf_counter() - began)

        CheckpointManager.save = timed  # type: ignore[method-assign]

    def _watch_writing(self) -> None:
        run = CheckpointWriter.run

        def timed(saving: CheckpointWriter) -> None:
            began = time.perf_counter()
            self._writing = (began, float("inf"))
            run(saving)
            self._writing = (began, time.perf_counter())
            self.seconds["written"].append(self._writing[1] - began)

        CheckpointWriter.run = timed  # type: ignore[method-assign]

    def step(self, kind: str, began: float, now: float) -> None:
        """Take note of a step; one that was only partly beside the writing counts for nothing."""
        if kind == "hand" or (kind == "beside" and now > self._writing[1]):
            return
        self.seconds[kind].append(now - began)


def save_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Write the state as scripts do, and fsync it; return the seconds that all ranks lose."""
    place = Path("by-hand.pt")
    _meet()
    began = time.perf_counter()
    if os.environ.get("RANK", "0") == "0":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with place.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    _meet()
    seconds = time.perf_counter() - began
    place.unlink(missing_ok=True)
    return seconds


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    times = Times()
    plan = ["plain"] * BEFORE + ROUND[-10:] + ROUND * ROUNDS + ["plain"]
    settings: dict[str, Any] = {"run_dir": "run", "threads": 1, "progress": False, "keep": 1}
    with lockstep.Run("saving", **settings, checkpoint_every=0) as run:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = run.model(nn.Sequential(*layers))
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=1e-6))
        batch = 2 * run.replicas
        inputs = torch.zeros(1, 1).expand(batch * len(plan), WIDTH)
        train = run.loader(TensorDataset(inputs), batch_size=batch)

        done, began = "", 0.0
        for _ in run.epochs(1):
            for kind, (images,) in zip(plan, train, strict=True):
                if done:  # what the run does between two steps belongs to the first
                    times.step(done, began, time.perf_counter())
                if kind == "hand":
                    assert times.checkpoints is not None, "a save came before"
                    times.checkpoints.wait()
                    times.seconds["hand"].append(save_by_hand(model, optimizer))
                done, began = kind, time.perf_counter()
                run.backward(model(images).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if kind == "save":
                    run.save()
        if run.is_main_process:
            Path(FILE).write_text(json.dumps(times.seconds), encoding="utf-8")


if __name__ == "__main__":
    main()
