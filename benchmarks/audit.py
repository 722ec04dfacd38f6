"""What audits cost: a microbatch that is computed twice now and then.

Claim: with the default of 1,024 steps between two audits, at most 1 % of the time of steps.

Measured: two ranks with one replica each, where an extra pass weighs most, train a small MLP and
ResNet-18 with an audit every 8 steps. An audited step takes longer than the steps beside it: that
is the cost of one audit, of which the default has one in 1,024 steps. Medians of each turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from support import Report, import_torchvision, options_parser
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.layout.audits import is_due

EVERY, DEFAULT, LIMIT = 8, 1024, 0.01


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), torch.ones(64, 64)


def resnet() -> tuple[nn.Module, torch.Tensor]:
    model = import_torchvision().models.resnet18(num_classes=10)
    return model, torch.ones(16, 3, 32, 32)


MODELS = {
    "MLP 64-64-10, 32 samples per rank": (mlp, 400),
    "ResNet-18, 8 images per rank": (resnet, 48),
}


def train(name: str, directory: str) -> tuple[list[float], list[float]]:
    """Return the seconds of audited steps, and of all others."""
    make, steps = MODELS[name]
    found: tuple[list[float], list[float]] = ([], [])
    with lockstep.Run(
        "audit", replicas=2, run_dir=directory, progress=False, threads=1, audit=str(EVERY)
    ) as run:
        module, batch = make()
        model = run.model(module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        inputs = batch.repeat(steps, *[1] * (batch.dim() - 1))
        labels = torch.zeros(len(inputs), dtype=torch.long)
        loader = run.loader(TensorDataset(inputs, labels), batch_size=len(batch))
        for whole in run.batches(loader):
            began = time.perf_counter()
            for x, y in whole:
                loss = F.cross_entropy(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            spent = time.perf_counter() - began
            if run.step > EVERY:  # the first steps are others: pages, caches, buckets
                found[not is_due(run.step, EVERY)].append(spent)
    return found


def main() -> None:
    options = options_parser(__doc__, pairs=5).parse_args()
    report = Report("Audits beside steps", options.json)
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as place:
        for name in MODELS:
            costs = []
            for number in range(options.pairs):
                directory = str(Path(place) / f"{len(rows)}-{number}")
                audited, others = lockstep.launch(train, n=2, args=(name, directory))[0]
                step = statistics.median(others)
                costs.append(((statistics.median(audited) - step) / step, step))
            extra = statistics.median(cost for cost, _ in costs)
            share = extra / DEFAULT
            step = statistics.median(step for _, step in costs)
            low, high = min(costs)[0], max(costs)[0]
            rows.append(
                [
                    name,
                    f"{1e3 * step:.2f}",
                    f"{extra:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{share:.2%}",
                ]
            )
            verdict = "holds" if share <= LIMIT else "does not hold"
            notes.append(f"{name}: {share:.2%}; claim: at most {LIMIT:.0%}: {verdict}")
    columns = ["model", "step, ms", "an audit, in steps", "min to max", f"share, one in {DEFAULT}"]
    report.table(
        f"an audit every {EVERY} steps ({options.pairs} rounds)", columns, rows, notes=notes
    )
    report.close()


if __name__ == "__main__":
    main()
