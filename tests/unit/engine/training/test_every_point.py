"""A run that goes on from any of its points ends as if nothing had been."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.recovery.checkpointing import StateSaver
from lockstep.engine.recovery.resume import SavedState, StateSearch
from lockstep.state.checkpoint.parts import StoredTensor


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 4, generator=generator), labels)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def plain(run: lockstep.Run) -> None:
    """Epochs of training, evaluation, and a scheduler that steps once for each."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    train, test = (
        run.loader(data(20), batch_size=8, shuffle=True),
        run.loader(data(9), batch_size=4),
    )
    for _ in run.epochs(3):
        model.train()
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            run.mean(F.cross_entropy(model(x), y) for x, y in test)
        scheduler.step()


class Mean:
    """A mean of the model's weights over time, as users write them."""

    def __init__(self) -> None:
        self.value = torch.zeros(())
        self.count = 0

    def update(self, model: nn.Module) -> None:
        self.count += 1
        self.value += (sum(p.detach().sum() for p in model.parameters()) - self.value) / self.count

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value, self.count = state["value"], state["count"]


def winding(run: lockstep.Run) -> None:  # noqa: C901
    """Training around two phases of epochs, a `break`, random numbers in between."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    mean = run.register("mean", Mean())
    first, second = (run.loader(data(count), batch_size=4, shuffle=True) for count in (12, 16))

    def batch(x: torch.Tensor, y: torch.Tensor) -> None:
        run.backward(F.cross_entropy(model(x) + torch.randn(3), y))
        optimizer.step()
        optimizer.zero_grad()

    for x, y in first:
        batch(x, y)
    for _ in run.epochs(2):
        with torch.no_grad():
            run.mean(F.cross_entropy(model(x), y) for x, y in second)
        noise = torch.randn(4)
        for x, y in first:
            batch(x + noise, y)
        for whole in run.batches(second):
            for x, y in whole:
                batch(x, y)
            if run.step % 3 == 0:
                break
        mean.update(model)
    for x, y in second:
        batch(x, y)
    for _ in run.epochs(2):
        for whole in run.batches(first):
            shift = torch.randn(4)
            for x, y in whole:
                batch(x + shift, y)
            for x, y in whole:
                batch(x - shift, y)
            mean.update(model)
            with torch.no_grad():
                run.mean(F.cross_entropy(model(x), y) for x, y in second)
    for x, y in first:
        batch(x, y)


def fresh_loaders(run: lockstep.Run) -> None:
    """A new loader in every epoch, and one between two phases: each has keys of its own."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    def loop(count: int) -> None:
        for x, y in run.loader(data(count), batch_size=4, shuffle=True):
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    for _ in run.epochs(2):
        loop(8)
        loop(8)
    loop(8)
    for _ in run.epochs(2):
        loop(12)


def leaving(run: lockstep.Run) -> None:
    """Epochs and loops that are left early, and buffers that no `state_dict` has."""
    module = net()
    module.register_buffer("seen", torch.zeros(()), persistent=False)
    model = run.model(module)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    loader = run.loader(data(24), batch_size=8, shuffle=True)

    def epochs(count: int, enough: int) -> None:
        for epoch in run.epochs(count):
            for whole in run.batches(loader):
                for x, y in whole:
                    logits = model(x) * (1 + module.seen)
                    if run.step % 5 == 4:
                        break  # its statistics count, its gradients are not wanted
                    run.backward(F.cross_entropy(logits, y))
                    optimizer.step()
                    optimizer.zero_grad()
                module.seen += 0.01
                if run.step % 5 == 4:
                    break
            if epoch + 1 == enough:
                break

    epochs(8, 2)
    epochs(3, 3)


def by_parts(run: lockstep.Run) -> None:
    """The head first, then the rest, then pruned; and an average with statistics of its own."""
    model = run.model(net())
    average = run.register("average", AveragedModel(model))
    optimizer = run.optimizer(torch.optim.SGD(model[4].parameters(), lr=0.05, momentum=0.9))
    loader = run.loader(data(24), batch_size=8, shuffle=True)
    for epoch in run.epochs(4):
        if epoch == 1:
            optimizer.add_param_group({"params": model[:2].parameters(), "lr": 0.02})
        if epoch == 2:
            prune.l1_unstructured(model[0], "weight", 0.5)
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if epoch < 2:
            average.update_parameters(model)
            update_bn(loader, average)


def by_steps(run: lockstep.Run) -> None:
    """As many loops as it takes, and one replica that keeps gradients from batch to batch."""
    model = run.model(net())
    often, seldom = nn.ModuleList([*model][:3]), nn.ModuleList([*model][3:])
    first = run.optimizer(torch.optim.NAdam(often.parameters(), lr=0.01))
    second = run.optimizer(torch.optim.SGD(seldom.parameters(), lr=0.05))
    run.save()
    batches = run.register("batches", Mean())
    while run.step < 8:
        for x, y in run.loader(data(12), batch_size=4, shuffle=True):
            run.backward(F.cross_entropy(model(x), y))
            first.step()
            first.zero_grad()
            batches.count += 1
            if batches.count % 2 == 0:
                second.step()
                second.zero_grad()


class Best:
    """The best of a metric, as users write it."""

    value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def by_metrics(run: lockstep.Run) -> None:
    """What metrics return decides: before training, of a generator that trains, rows, whole sums."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    plateau = run.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    best = run.register("best", Best())
    train, test = (
        run.loader(data(20), batch_size=8, shuffle=True),
        run.loader(data(9), batch_size=4),
    )

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def epoch(scale: float):
        model.train()
        for x, y in train:
            value = loss(x, y) * scale
            run.backward(value)
            optimizer.step()
            optimizer.zero_grad()
            yield {"loss": value.detach(), "weighted": (value.detach(), len(x) * 3)}

    model.eval()
    with torch.no_grad():
        first = run.mean(loss(x, y) for x, y in test)
        rows = run.gather(model(x).argmax(1) for x, _ in test)
        table = run.sum((F.one_hot(y, 3).float().T @ model(x) for x, y in test), per_sample=False)
    assert table.shape == (3, 3)
    scale = first + rows.sum().item() + table.sum().item() / 100
    for number in run.epochs(3):
        means = run.mean(epoch(scale))
        plateau.step(means["loss"] if number % 2 else -means["weighted"])
        run.save(best=-means["loss"])
        model.eval()
        with torch.no_grad():
            rows = run.gather(model(x).argmax(1) for x, _ in test)
        best.value = max(best.value, means["loss"] + rows.sum().item() + torch.rand(()).item())
    seen = run.gather(row["loss"].expand(len(run._loop.microbatch.indices)) for row in epoch(scale))
    for x, y in train:
        run.backward(loss(x, y) * (means["loss"] + best.value + seen.sum().item()))
        optimizer.step()
        optimizer.zero_grad()
    run.save()
    best.value += 1


def by_names(run: lockstep.Run) -> None:
    """Names that loops assign are used after them; with one replica a loss decides."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    cycle = run.scheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=16))
    best = run.register("best", Best())
    train = run.loader(data(12), batch_size=4, shuffle=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        cycle.step()
        optimizer.zero_grad()
        return loss

    for x, y in train:
        loss = step(x, y)
    best.value += loss.item()
    for epoch in run.epochs(3):
        for batch in run.batches(train):
            for x, y in batch:
                loss = step(x, y)
            if run.step == 8:
                break
        best.value += loss.item() * (1 + epoch)
        accuracy = run.mean((model(x).argmax(1) == y for x, y in train))
        best.value += loss.item() + accuracy
    best.value += loss.item() + accuracy + epoch
    for number in range(2):
        for x, y in train:
            loss = step(x, y)
            if run.step >= 13 + number:
                break
        best.value += loss.item()
        run.save(best=best.value)
        best.value *= 2


def by_decisions(run: lockstep.Run) -> None:
    """Whether the script saves and evaluates follows from the best until then, registered and not."""
    model = run.model(nn.Linear(4, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    decay = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))
    best, own, kept = run.register("best", Best()), 0.0, run.register("kept", Best())
    train, test = (
        run.loader(data(20), batch_size=8, shuffle=True),
        run.loader(data(9), batch_size=4),
    )

    def stage() -> float:
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return 9 - run.mean(F.cross_entropy(model(x), y) for x, y in test)

    for _ in run.epochs(4):
        kept.value += 1
        score = stage()
        if score > best.value:
            best.value = score
            run.save(best=score)
            decay.step()
        if score > own:
            own = score
            run.mean(model(x).argmax(1) == y for x, y in test)
            run.save()
        kept.value *= 1.5
    for _ in run.epochs(2):
        score = stage()
        if score < best.value:
            run.save()
            best.value += score
    for x, y in train:
        run.backward(F.cross_entropy(model(x), y) * best.value)
        optimizer.step()
        optimizer.zero_grad()


def by_digests(run: lockstep.Run) -> None:
    """Digests of weights before an update, between epochs and around all are used after their batch."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    train, seen = run.loader(data(12), batch_size=4, shuffle=True), run.register("seen", Best())
    first = run.digest()

    def epoch() -> str:
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            before = run.digest()
            optimizer.step()
            optimizer.zero_grad()
            after = run.digest()
        return before + after

    for _ in run.epochs(3):
        at_begin = run.digest()
        for text in (first, at_begin, epoch(), run.digest()):
            seen.value += int(text[-8:], 16) / 2**20 + int(text[7:15], 16) / 2**20
        run.save()
    seen.value += int(at_begin[7:15], 16) / 2**20
    for text in (epoch(), run.digest()):
        seen.value += int(text[7:15], 16) / 2**20


def by_variables(run: lockstep.Run) -> None:
    """Annealing, counts, a queue, snapshots and an early stop, by variables of `run.state`."""
    model = run.model(net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(data(20), batch_size=8, shuffle=True)
    state = run.state(best=float("inf"), ratio=1.0, snaps=[], recent=deque([0.0], maxlen=3))
    counts = run.state("counts", batches=0)
    for _ in run.epochs(4):
        for batch in run.batches(train):
            for x, y in batch:
                loss = (state.ratio + max(state.recent)) * F.cross_entropy(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            counts.batches += 1
            state.recent.append(1 / counts.batches)
        with torch.no_grad():
            loss = run.mean(F.cross_entropy(model(x), y) for x, y in train)
        state.ratio *= 0.8
        state.snaps.append(model[0].weight.detach().clone())
        if loss > state.best:
            break
        state.best = loss - 0.01


def train(script: Callable[[lockstep.Run], None], directory: Path, number: int) -> tuple[str, int]:
    replicas = 1 if script in (by_steps, by_names) else 2
    # A pass that counts statistics and is then left cannot be made twice.
    audit = "off" if script is leaving else "1024"
    with lockstep.Run(
        "run", replicas=replicas, run_dir=directory / f"{number}", progress=False, audit=audit
    ) as run:
        script(run)
    return run.digest(), run.step


@pytest.mark.parametrize(
    "script",
    [
        plain,
        winding,
        fresh_loaders,
        leaving,
        by_parts,
        by_steps,
        by_metrics,
        by_names,
        by_decisions,
        by_digests,
        by_variables,
    ],
)
@pytest.mark.parametrize("third", [1, 2, 0])
@pytest.mark.wide(beyond=11)
def test_from_every_point(script, third, tmp_path, monkeypatch, capsys):
    """A third of the points in `make test`, all in `make test-wide`."""
    points: list[SavedState] = []

    def keep(keeper: StateSaver) -> None:
        keeper._metrics.note_partial()
        text, tensors = keeper._capture()
        stored = {name: StoredTensor.of(tensor.clone()) for name, tensor in tensors.items()}
        points.append(SavedState(text, stored, "test"))

    monkeypatch.setattr(StateSaver, "at_point", keep)
    whole = train(script, tmp_path, 0)
    recorded, points = points, []
    assert len(recorded) >= 6
    monkeypatch.setattr("lockstep.engine.recovery.resume.ResumeInfo.is_new", False)
    for number, saved in enumerate(recorded, 1):
        if number % 3 != third:
            continue
        monkeypatch.setattr(StateSearch, "find", lambda _, saved=saved: saved)
        assert train(script, tmp_path, number) == whole, saved.position
        # From there on it passes the same points, but for saves that follow from what is not registered.
        rest = recorded[number:]
        assert script is by_decisions or [one.position.as_json()[0] for one in points] == [
            one.position.as_json()[0] for one in rest
        ]
        points.clear()
