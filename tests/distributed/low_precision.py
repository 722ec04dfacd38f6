"""Jobs in reduced precision, with compressed exchanges, and with averages of parameters."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep
from lockstep.engine.recovery.preemption import Preempted
from tests.distributed.jobs import Alternating, classes, conv_net, fit, quiet_run


class Bursting(nn.Module):
    """A linear layer with a row whose gradient is infinite where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        # Forward it is harmless; backward a gradient comes out that no scale makes finite.
        y.register_hook(lambda gradient: gradient * gradient.new_tensor([factor, 1.0, 1.0, 1.0]))
        return y


def overflow(settings: dict[str, Any], batch: int = 3, replica: int = 2) -> tuple[Any, ...]:
    """Train in fp16; in one batch one replica's gradient overflows. Digests and scales of each step."""
    told = []
    with quiet_run(precision="fp16", replicas=4, **settings) as run:
        model = run.model(Bursting())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9))
        for number, turn in enumerate(
            run.batches(run.loader(classes(60, (6,)), batch_size=10, shuffle=True))
        ):
            for x, y in turn:
                here = run._loop.microbatch
                assert here is not None
                hit = number == batch and here.replica == replica
                run.backward(F.cross_entropy(model(x, float("inf") if hit else 1.0), y))
                norm = run.clip_grad_norm_(model, 10.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            told.append((run.digest(), run.scale, str(float(norm)), run.step))
        return told, run.digest(), scheduler.last_epoch, run.exactness


def train_half(settings: dict[str, Any]) -> str:
    """The convolutional net with BatchNorm and dropout in fp16."""
    with quiet_run(precision="fp16", **settings) as run:
        model = run.model(conv_net())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        fit(run, model, run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True), optimizer)
        return run.digest()


def train_local(
    settings: dict[str, Any], keywords: dict[str, Any] | None = None, epochs: int = 3
) -> tuple[Any, ...]:
    """Train with an approximate exchange or strategy: digest, exactness, and when ranks had one model.

    67 samples in batches of 16: the last has 3, and with 4 replicas or more some have none.
    """
    with quiet_run(exact=False, **settings) as run:
        model = run.model(conv_net(), **(keywords or {}))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        data = run.loader(classes(67, (1, 8, 8)), batch_size=16, shuffle=True)
        told = []
        for _ in run.epochs(epochs):
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if run._loop.acts_now():
                    told.append(run._session.state.models[0].is_synchronized)
        return run.digest(), run.exactness, told


def train_and_stop(directory: str, strategy: str, slow: float = 0.0) -> str:
    """Train with AdamW; return the digest, or `preempted`."""
    try:
        with lockstep.Run(
            "local", run_dir=directory, progress=False, exact=False, strategy=strategy, sync_every=4
        ) as run:
            model = run.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
            optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            data = run.loader(classes(60, (6,)), batch_size=10, shuffle=True)
            for _ in run.epochs(8):
                for x, y in data:
                    time.sleep(slow)
                    run.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        return run.digest()
    except Preempted:
        return "preempted"


def out_of_phase(directory: str, slow: float = 0.0) -> tuple[str, list[int]]:
    """Two models, the second of which begins three batches later; digest and steps of points."""
    points: list[int] = []
    try:
        with lockstep.Run(
            *("two",),
            run_dir=directory,
            progress=False,
            exact=False,
            strategy="local-sgd",
            sync_every=4,
        ) as run:
            models = [run.model(nn.Linear(6, 4)) for _ in range(2)]
            steps = [run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in models]
            run._loop._on_point.insert(0, lambda: points.append(run.step))
            for x, y in run.loader(classes(600, (6,)), batch_size=10):
                time.sleep(slow)
                for model, optimizer in zip(models[: 1 + (run.step > 2)], steps, strict=False):
                    run.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        return run.digest(), points
    except Preempted:
        return "preempted", points


def by_samples(settings: dict[str, Any]) -> list[float]:
    """Plain SGD on batches of which ranks have different numbers of samples; return all weights."""
    with quiet_run(**settings) as run:
        model = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        fit(run, model, run.loader(classes(67, (6,)), batch_size=16, shuffle=True), optimizer)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def with_keywords(strategy: str, keywords: dict[str, Any]) -> None:
    """Keywords of DistributedDataParallel."""
    with quiet_run(exact=False, strategy=strategy) as run:
        run.model(conv_net(), **keywords)


def differing_memory(rounds: int) -> list[list[Any]]:
    """What ranks tell each other, where it is the same and where it is not."""
    from lockstep.engine.strategies.local_sgd.averaging import Averaging

    with quiet_run(exact=False) as run:
        group = run._session.context.group
        assert group is not None
        means, told = Averaging(group, torch.device("cpu")), []
        for _ in range(rounds):
            told.append(means.gather([run.world.rank, 5], {"same": [1, None, "é"]}))
            told.append(means.gather([7], ["x"] * (3 * run.world.rank)))
        return told


def with_barriers(settings: dict[str, Any], often: bool) -> str:
    """Train; after every batch, wait for all."""
    with quiet_run(exact=False, **settings) as run:
        model = run.model(conv_net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(run.loader(classes(67, (1, 8, 8)), batch_size=16)):
            for x, y in batch:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if often:
                run.barrier()
                with run.main_process_first():
                    pass
        return run.digest()


def accuracy(settings: dict[str, Any], lr: float = 0.1, epochs: int = 8) -> tuple[float, str]:
    """Train an MLP on the scans of digits; return its accuracy on those it has not seen."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    both = TensorDataset(images, torch.tensor(digits.target))
    with quiet_run(replicas=2, **settings) as run:
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
        train = run.loader(Subset(both, range(1440)), batch_size=64, shuffle=True)
        fit(run, model, train, optimizer, epochs)
        test = run.loader(Subset(both, range(1440, 1797)), batch_size=128)
        model.eval()
        with torch.no_grad():
            right = run.mean(model(x).argmax(1) == y for x, y in test)
        return right, run.digest()


def leave_alone(strategy: str) -> None:
    """The second rank leaves a loop by itself."""
    with quiet_run(exact=False, strategy=strategy, sync_every=4) as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x, y) in enumerate(run.loader(classes(80, (6,)), batch_size=10)):
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if number == 1 and run.world.rank == 1:
                break


def two_optimizers() -> None:
    """One for each layer of a model."""
    with quiet_run(exact=False, strategy="local-sgd") as run:
        model = run.model(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)))
        for layer in model:
            run.optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))


def one_optimizer_for_two_models() -> None:
    """Whose steps would be counted twice."""
    with quiet_run(exact=False, strategy="diloco") as run:
        models = [run.model(nn.Linear(6, 4)) for _ in range(2)]
        both = [p for model in models for p in model.parameters()]
        run.optimizer(torch.optim.SGD(both, lr=0.1))


def scaled_and_stopped(directory: str) -> tuple[str, float]:
    """Train in fp16 with an overflow in the third step; return digest and scale, or `preempted`."""
    try:
        with lockstep.Run("fp16", run_dir=directory, progress=False, precision="fp16") as run:
            model = run.model(Bursting())
            optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            data = run.loader(classes(60, (6,)), batch_size=10, shuffle=True)
            for _ in run.epochs(4):
                for x, y in data:
                    factor = float("inf") if run.step == 2 else 1.0
                    run.backward(F.cross_entropy(model(x, factor), y))
                    optimizer.step()
                    optimizer.zero_grad()
        return run.digest(), run.scale
    except Preempted:
        return "preempted", run.scale


def train_unused(settings: dict[str, Any], batch: int = 4) -> tuple[str, bool]:
    """A part that no replica ever uses, and one that some do; whether the first has kept its bits."""
    with quiet_run(exact=False, **settings) as run:
        net = Alternating()
        net.never = nn.Linear(3, 4)
        model = run.model(net)
        before = model.never.weight.detach().clone()
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        fit(run, model, run.loader(classes(160, (3,)), batch_size=batch, shuffle=True), optimizer)
        return run.digest(), torch.equal(before, model.never.weight)
