"""Training jobs that the distributed tests run on several layouts; each returns a digest."""

from __future__ import annotations

import contextlib
import hashlib
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep


@contextlib.contextmanager
def quiet_run(**settings: Any) -> Iterator[lockstep.Run]:
    """A run that shows nothing and leaves nothing behind."""
    with tempfile.TemporaryDirectory() as directory:
        defaults = {"run_dir": directory, "progress": False, "threads": 1, "seed": 3}
        with lockstep.Run("test", **{**defaults, **settings}) as run:
            yield run


def classes(samples: int, shape: tuple[int, ...], seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (samples,), generator=generator))


def fit(run: lockstep.Run, model: nn.Module, train: Any, optimizer: Any, epochs: int = 2) -> None:
    for _ in run.epochs(epochs):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * 64, 4),
    )


def train_conv(settings: dict[str, Any], ddp: dict[str, Any], epochs: int = 2) -> str:
    """A convolutional net with BatchNorm and dropout; 50 samples in batches of 16: the last has 2."""
    with quiet_run(**settings) as run:
        model = run.model(conv_net(), **ddp)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        fit(
            run,
            model,
            run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True),
            optimizer,
            epochs,
        )
        return run.digest()


def train_even(settings: dict[str, Any]) -> str:
    """The convolutional net on batches that two replicas share evenly; see plain.py."""
    with quiet_run(**settings) as run:
        model = run.model(conv_net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        data = run.loader(classes(48, (1, 8, 8)), batch_size=16, shuffle=True)
        fit(run, model, data, optimizer)
        return run.digest()


def train_resnet() -> str:
    """torchvision's ResNet-18 with dropout before its last layer."""
    from tests.vision import resnet18

    with quiet_run() as run:
        net = resnet18(num_classes=4)
        net.fc = nn.Sequential(nn.Dropout(0.5), net.fc)
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        data = run.loader(classes(16, (3, 32, 32)), batch_size=8, shuffle=True)
        fit(run, model, data, optimizer, epochs=1)
        return run.digest()


class Routed(nn.Module):
    """An embedding model that uses one of two branches, by the first token, and never a third."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.never = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        branch = self.branches[int(tokens[0, 0]) % 2]
        return branch(self.embedding(tokens).mean(1))


def train_routed() -> str:
    """Parameters that some replicas use, some don't, and some that none ever does, with weight decay."""
    with quiet_run() as run:
        model = run.model(Routed())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 20, (60, 5), generator=generator)
        data = TensorDataset(tokens, torch.randint(0, 4, (60,), generator=generator))
        fit(run, model, run.loader(data, batch_size=12, shuffle=True), optimizer)
        return run.digest()


def train_gan() -> str:
    """Two models and two optimizers, which take turns on every global batch."""
    with quiet_run() as run:
        maker = run.model(
            nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        )
        judge = run.model(
            nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        )
        maker_steps = run.optimizer(torch.optim.Adam(maker.parameters(), lr=0.01))
        judge_steps = run.optimizer(torch.optim.Adam(judge.parameters(), lr=0.01))
        data = run.loader(classes(44, (6,)), batch_size=12, shuffle=True)
        for _ in run.epochs(2):
            for batch in run.batches(data):
                for real, _ in batch:
                    fake = maker(torch.randn(len(real), 4)).detach()
                    judge_steps.zero_grad()
                    run.backward(F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean())
                    judge_steps.step()
                for real, _ in batch:
                    maker_steps.zero_grad()
                    run.backward(F.softplus(-judge(maker(torch.randn(len(real), 4)))).mean())
                    maker_steps.step()
        return run.digest()


def train_adamw(precision: str = "fp32") -> str:
    """AdamW with clipping and a schedule per step and per epoch."""
    with quiet_run(precision=precision) as run:
        model = run.model(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4))
        )
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        data = run.loader(classes(50, (64,)), batch_size=16, shuffle=True)
        warmup = run.scheduler(
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=3 * len(data))
        )
        for _ in run.epochs(3):
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                run.clip_grad_norm_(model, 0.5)
                optimizer.step()
                warmup.step()
                optimizer.zero_grad()
        return run.digest()


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Samples that draw from all three generators."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(6) + float(np.random.rand()) + random.random()
        return noise * (index % 7), index % 4


def train_augmented(workers: int) -> str:
    """Random augmentation in the dataset, fetched by workers."""
    with quiet_run() as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        # Ranks of a test inherit a different way of starting processes, which takes seconds in each loop.
        context = {"multiprocessing_context": "fork"} if workers else {}
        data = run.loader(Augmented(), batch_size=12, shuffle=True, num_workers=workers, **context)
        fit(run, model, data, optimizer)
        return run.digest()


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(37):
            yield torch.randn(6) + index, index % 4


def train_stream(workers: int) -> str:
    """An iterable dataset that draws as it goes."""
    with quiet_run() as run:
        model = run.model(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        fit(run, model, run.loader(Stream(), batch_size=8, num_workers=workers), optimizer)
        return run.digest()


class Features(torch.Tensor):
    """A tensor of a class of the script's own."""


def evaluate(samples: int) -> tuple[Any, ...]:
    """Metrics over an evaluation that no number of ranks divides; and how often each sample came."""
    with quiet_run() as run:
        data = run.loader(classes(samples, (3,)), batch_size=256)
        with torch.no_grad():
            count = run.sum(torch.ones(len(y), dtype=torch.int64) for _, y in data)
            mean = run.mean({np.str_("x"): x.mean(1), "right": y == 1} for x, y in data)
            rows = run.gather(x.as_subclass(Features) for x, _ in data)
        same = torch.equal(rows, classes(samples, (3,)).tensors[0])
        return count, mean["x"].hex(), mean["right"].hex(), same


def devices_of_a_batch() -> tuple[str, str]:
    """Where a loader puts its batches."""
    with quiet_run() as run:
        data = run.loader(classes(8, (3,)), batch_size=8, num_workers=1)
        ((x, y),) = list(data)
        return x.device.type, y.device.type


def take_turns(directory: str) -> list[str]:
    """Who has been in `run.main_process_first` before this rank leaves it."""
    import time
    from pathlib import Path

    with quiet_run() as run:
        log = Path(directory, "log")
        with run.main_process_first():
            if run.is_main_process:
                time.sleep(0.2)
            with log.open("a") as file:
                file.write(f"{run.world.rank}\n")
            seen = log.read_text().split()
        run.barrier()
        with run.main_process_first():  # a second turn waits for its own first rank
            pass
        return seen


def train_twice() -> tuple[str, str]:
    """Two runs after each other in one process."""
    return train_conv({"seed": 1}, {}, 1), train_conv({"seed": 2}, {}, 1)


def train_frozen() -> str:
    """A loss through a model without trainable parameters, and one that is only looked at."""
    with quiet_run() as run:
        critic = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        critic = run.model(critic)
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(classes(40, (6,)), batch_size=10, shuffle=True):
            run.backward(F.cross_entropy(critic(model(x)), y))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def train_with_breaks() -> str:
    """Every epoch is left in the middle, on all ranks alike."""
    with quiet_run() as run:
        model = run.model(conv_net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True)
        for _ in run.epochs(3):
            for number, batch in enumerate(run.batches(data)):
                for x, y in batch:
                    run.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                if number == 1:
                    break
        return run.digest()


class Sometimes(nn.Module):
    """Uses its second layer for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return y + self.second(x) if x.sum() > 0 else y


def train_two_models(exchange: str = "auto") -> str:
    """One loss through two models, one of which leaves a part unused on some replicas."""
    with quiet_run(exchange=exchange) as run:
        encoder = run.model(nn.Linear(6, 6))
        head = run.model(Sometimes())
        both = [*encoder.parameters(), *head.parameters()]
        optimizer = run.optimizer(torch.optim.AdamW(both, lr=0.01))
        for x, y in run.loader(classes(40, (6,)), batch_size=8, shuffle=True):
            run.backward(F.cross_entropy(head(encoder(x)), y))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def turn_in_memory(channels: int, replicas: int = 2) -> str:
    """The memory format is another one after `run.model`."""
    with quiet_run(replicas=replicas) as run:
        layers = nn.Conv2d(channels, 5, 3), nn.Flatten(), nn.Linear(20, 4)
        model = run.model(nn.Sequential(*layers)).to(memory_format=torch.channels_last)
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        data = run.loader(classes(24, (channels, 4, 4)), batch_size=8, shuffle=True)
        fit(run, model, data, optimizer, 1)
        return run.digest()


class Formats(nn.Module):
    """Parameters that lie in memory in other orders than that of indices, or with gaps; complex ones."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(4, 5).t())
        self.gaps = nn.Parameter(torch.randn(8, 4)[::2])
        self.phases = nn.Parameter(torch.randn(outputs, 4, dtype=torch.complex64).t())
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.view(-1, 3, 4, 4)).relu().mean((2, 3)) @ self.transposed @ self.gaps
        return (y.to(torch.complex64) @ self.phases).abs()


def train_formats(settings: dict[str, Any], models: int = 1) -> str:
    """One loss through one or two models whose parameters lie in memory in several ways."""
    with quiet_run(**settings) as run:
        parts = [run.model(Formats(48 if k + 1 < models else 4)) for k in range(models)]
        both = [p for part in parts for p in part.parameters()]
        optimizer = run.optimizer(torch.optim.Adam(both, lr=0.01))
        data = run.loader(classes(40, (48,)), batch_size=8, shuffle=True)
        fit(run, nn.Sequential(*parts), data, optimizer, 1)
        return run.digest()


class Codebook(nn.Module):
    """Changes a buffer in a method that is called before `forward`, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("center", torch.zeros(6))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.center

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def train_codebook() -> str:
    with quiet_run() as run:
        model = run.model(Codebook())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(classes(40, (6,)), batch_size=8, shuffle=True):
            run.backward(F.cross_entropy(model(model.features(x)), y))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def main_iterates_alone(exchange: str) -> None:
    """The main rank draws a batch for itself, and so gets another round than the others."""
    with quiet_run(exchange=exchange) as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = run.loader(classes(40, (6,)), batch_size=8, shuffle=True)
        if run.is_main_process:
            next(iter(data))
        fit(run, model, data, optimizer)


def different_models() -> None:
    """Each replica computes on a model of its own."""
    with quiet_run() as run:
        models = [run.model(nn.Linear(6, 4)) for _ in range(2)]
        for x, y in run.loader(classes(40, (6,)), batch_size=8):
            run.backward(F.cross_entropy(models[run.world.rank](x), y))


def slow_tail() -> str:
    """Backward passes without a step, and a main rank that lingers in the last one's body."""
    import time

    with quiet_run() as run:
        model = run.model(nn.Linear(6, 4))
        for x, y in run.loader(classes(16, (6,)), batch_size=8):
            run.backward(F.cross_entropy(model(x), y))
            model.zero_grad()
            if run.is_main_process:
                time.sleep(2.5)
        return run.digest()


def count_microbatches() -> None:
    """What a rank that hosts one replica takes for steps."""
    with quiet_run(replicas=2) as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x, y) in enumerate(run.loader(classes(40, (6,)), batch_size=8)):
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if number == 4:
                break


def freeze_later() -> None:
    with quiet_run(replicas=2) as run:
        model = run.model(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = run.loader(classes(16, (6,)), batch_size=8)
        for epoch in run.epochs(2):
            model[0].requires_grad_(epoch == 0)
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def look_like_the_module() -> tuple[Any, ...]:
    """What a script may ask of a model on any layout."""
    import copy

    with quiet_run() as run:
        model = run.model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        average = copy.deepcopy(model)
        model.note = "kept"
        return (
            len(model),
            [name for name, _ in model.named_modules()],
            list(model.state_dict()),
            type(average).__name__,
            model[0].out_features,
            model.note,
            type(model) is nn.Sequential,
        )


class Alternating(nn.Module):
    """Uses a branch on one sample only, whose replica wanders from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.branch = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.branch(x) if (x[:, 0] > 1).any() else y


def train_alternating() -> str:
    """A parameter that now this rank alone uses, now another one, now none; with weight decay."""
    with quiet_run() as run:
        model = run.model(Alternating())
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        fit(run, model, run.loader(classes(160, (3,)), batch_size=4, shuffle=True), optimizer)
        return run.digest()


def train_two_optimizers() -> str:
    """Two optimizers on parts of one model, one of which lets a scheduler count before the run knows it."""
    with quiet_run() as run:
        model = run.model(conv_net())
        first = torch.optim.AdamW(model[0].parameters(), lr=0.01)
        rates = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(first, 0.9))
        steps = [
            run.optimizer(first),
            run.optimizer(torch.optim.SGD(model[1:].parameters(), lr=0.1, momentum=0.9)),
        ]
        for x, y in run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True):
            run.backward(F.cross_entropy(model(x), y))
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
            rates.step()
        return run.digest()


def train_with_loads() -> str:
    """Weights are loaded between epochs, and once an optimizer's state: it keeps the rest of its memory."""
    with quiet_run() as run, tempfile.TemporaryDirectory() as directory:
        model = run.model(conv_net())
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        weights = f"{directory}/weights.pt"
        torch.save(model.state_dict(), weights)
        data = run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True)
        for epoch in run.epochs(3):
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 0:
                run.load(weights)
        nothing = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        optimizer.load_state_dict(nothing)  # begins anew
        for x, y in data:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


#: Bytes of a sample's row, or of what one replica adds.
METRIC_SIZES = (1 << 10, 100 << 10, 10 << 20)


def measure_by_size(replicas: int) -> str:
    """Every metric at several sizes, where ranks have unequal shares; return a hash of all values."""
    samples, hashed = torch.arange(7), hashlib.sha256()
    with quiet_run(replicas=replicas) as run:
        data = run.loader(TensorDataset(samples), batch_size=7)
        for size in METRIC_SIZES:
            rows = torch.arange(size // 8, dtype=torch.float64)
            gathered = run.gather(x[:, None] * rows for (x,) in data)
            assert torch.equal(gathered, samples[:, None] * rows)
            summed = run.sum((x.sum() * rows for (x,) in data), per_sample=False)
            assert torch.equal(summed, samples.sum() * rows)
            # Only the replica that has the first sample has the long name.
            name, first = "n" * size, range(-(-7 // replicas))
            for metric, divides in ((run.mean, True), (run.sum, False)):
                found = metric({"all": x, **({name: x} if 0 in x else {})} for (x,) in data)
                assert found["all"] == 21 / (7 if divides else 1)
                assert found[name] == sum(first) / (len(first) if divides else 1)
            hashed.update(gathered.numpy().tobytes() + summed.numpy().tobytes())
    return hashed.hexdigest()
