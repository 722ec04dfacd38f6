"""Training on scikit-learn's digits in any way that a run can: by `run_ranks`, or as a script."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.data import TensorDataset

from tests.distributed.jobs import quiet_run


class Told(TypedDict):
    """What a training tells of itself.

    Attributes:
        exactness: the class that it states.
        digest: of its weights.
        accuracy: on samples that it was not trained on.
        weights: all parameters, one after the other.
    """

    exactness: str
    digest: str
    accuracy: float
    weights: list[float]


@functools.cache
def data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 scans to train on, and 360 others."""
    # Its file is read without scikit-learn, whose import would be the longest part of a test.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    rows = np.loadtxt(Path(spec.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    # By NumPy: torch would start threads, which no fork takes along.
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).numpy()]
    x = torch.from_numpy((rows[:, :64] / 16).astype(np.float32))
    y = torch.from_numpy(rows[:, 64].astype(np.int64))
    return TensorDataset(x[360:], y[360:]), TensorDataset(x[:360], y[:360])


def net(*, norm: bool = False) -> nn.Sequential:
    """Return three layers, in parts that a pipeline or tensor parallelism can take; no dropout."""
    middle = nn.BatchNorm1d(32) if norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), middle, nn.ReLU(), nn.Linear(32, 10)
    )


def plan() -> dict[str, ParallelStyle]:
    """Return how tensor parallelism cuts its layers: columns, then rows."""
    return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def train(settings: dict[str, Any], norm: str = "", epochs: int = 12) -> Told:
    """Train a small net.

    Args:
        settings: of the run.
        norm: `synced` for a net with BatchNorm over the global batch, `plain` for one as it is.
        epochs: of 30 steps each.
    """
    with warnings.catch_warnings():
        # Some of torch's own ways to hold a model warn of others.
        warnings.simplefilter("ignore", category=FutureWarning)
        return _train(settings, norm, epochs)


def _train(settings: dict[str, Any], norm: str, epochs: int) -> Told:
    training, rest = data()
    with quiet_run(**settings) as run:
        module: nn.Module = net(norm=bool(norm))
        if norm == "synced":
            module = run.sync_batchnorm(module)
        model = run.model(module, plan=plan())  # which strategies that don't cut layers leave aside
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        for _ in run.epochs(epochs):
            for x, y in run.loader(training, batch_size=48, shuffle=True):
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            accuracy = run.mean(
                model(x).argmax(1) == y for x, y in run.loader(rest, batch_size=120)
            )
        run.export(run.directory / "weights.pt")
        run.barrier()
        weights = (
            torch.load(run.directory / "weights.pt", weights_only=True)
            if run.is_main_process
            else {}
        )
        return Told(
            exactness=run.exactness,
            digest=run.digest(),
            accuracy=accuracy,
            weights=[
                number for name in sorted(weights) for number in weights[name].flatten().tolist()
            ],
        )


def main() -> None:
    """Train as `sys.argv[1]` says, in JSON, and write what is told to the file `sys.argv[2]`."""
    told = train(json.loads(sys.argv[1]), epochs=int(sys.argv[3]))
    if told["weights"]:
        Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
