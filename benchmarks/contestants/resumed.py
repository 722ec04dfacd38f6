"""A loop over samples that take 5 ms each; writes when it has its first batch.

    BENCHMARK_DOES=fresh|save|resume resumed.py WHO BATCHES WORKERS

`save` trains up to 90 % of the epoch and saves its state, `resume` goes on from there.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lockstep

WHO, BATCHES, WORKERS = sys.argv[1:]
WHAT = os.environ["BENCHMARK_DOES"]  # an argument would make it another run
BATCH = 16
STOP = int(BATCHES) * 9 // 10
began = 0.0
WORKER_SETTINGS = {"num_workers": int(WORKERS)}


class Slow(Dataset[torch.Tensor]):
    """Samples that take 5 ms each."""

    def __len__(self) -> int:
        return BATCH * int(BATCHES)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.full((8,), float(index))


def loop_begins() -> None:
    """Take the time: everything is made and loaded, and the loop comes next."""
    global began  # noqa: PLW0603 - a script
    began = time.time()


def first() -> None:
    """The first batch is there: write when, and how long the loop took to it, and end."""
    if WHAT != "save":
        now = time.time()
        Path("times").write_text(f"{now!r} {now - began!r}", encoding="utf-8")
        raise SystemExit


def train(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return a loss."""
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def with_lockstep() -> None:
    settings = {"run_dir": "run", "threads": 1, "progress": False}
    with lockstep.Run("resumed", **settings) as run:
        model = run.model(nn.Linear(8, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-9))
        loader = run.loader(Slow(), batch_size=BATCH, shuffle=True, **WORKER_SETTINGS)
        loop_begins()
        for _ in run.epochs(2):
            for inputs in loader:
                first()
                run.backward(train(model, inputs))
                optimizer.step()
                optimizer.zero_grad()
                if WHAT == "save" and run.step + 1 == STOP:
                    run.save()
                if WHAT == "save" and run.step == STOP:
                    raise SystemExit


def with_torchdata() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    torch.manual_seed(0)
    loader = StatefulDataLoader(Slow(), batch_size=BATCH, shuffle=True, **WORKER_SETTINGS)
    saved = Path("torchdata.pt")
    if WHAT == "resume":
        state = torch.load(saved, weights_only=False)
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
    loop_begins()
    for step, inputs in enumerate(loader):
        first()
        train(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        if WHAT == "save" and step + 1 == STOP:
            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, saved)
            return


def by_hand() -> None:
    """What is written without either: the batches that are done are fetched again, and left out."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    torch.manual_seed(0)
    done = STOP if WHAT == "resume" else 0
    loader = DataLoader(Slow(), batch_size=BATCH, shuffle=True, **WORKER_SETTINGS)
    loop_begins()
    for step, inputs in enumerate(loader):
        if step < done:
            continue
        first()
        train(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        if WHAT == "save":
            return


def main() -> None:
    torch.set_num_threads(1)
    ways = {"lockstep": with_lockstep, "torchdata": with_torchdata, "by-hand": by_hand}
    with contextlib.suppress(SystemExit):
        ways[WHO]()


if __name__ == "__main__":
    main()
