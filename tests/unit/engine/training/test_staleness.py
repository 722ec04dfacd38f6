"""`Run(staleness=K)` on one rank: what a plain loop that keeps old parameters comes to (B11)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

STEPS = 4


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(8 * STEPS, 4), torch.arange(8 * STEPS) % 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05)


def by_hand(staleness: int, epochs: int) -> tuple[nn.Module, list[float]]:
    """Return the model and the losses: gradients of batch t with the parameters of t - K updates."""
    newest = net()
    optimizer = adam(newest)
    history = [copy.deepcopy(newest.state_dict())]
    late, losses = net(), []
    buffers = dict(late.named_buffers())
    for _ in range(epochs):
        late.train()
        for x, y in zip(*(tensor.split(8) for tensor in data().tensors), strict=True):
            t = len(history) - 1
            with torch.no_grad():
                for name, parameter in late.named_parameters():
                    parameter.copy_(history[max(0, t - staleness)][name])
            late.zero_grad()
            loss = F.cross_entropy(late(x), y)
            loss.backward()
            losses.append(loss.item())
            for own, theirs in zip(newest.parameters(), late.parameters(), strict=True):
                own.grad = theirs.grad
            optimizer.step()
            history.append(copy.deepcopy(newest.state_dict()))
    newest.load_state_dict({**newest.state_dict(), **buffers})
    return newest, losses


def train(run: Any, epochs: int, seen: list[float], *, between: Any = None) -> nn.Module:
    model = run.model(net())
    optimizer = run.optimizer(adam(model))
    loader = run.loader(data(), batch_size=8)
    for _ in run.epochs(epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            seen.append(loss.item())
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if between is not None:
                between(run, model)
        model.eval()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_what_a_plain_loop_with_old_parameters_does(
    make_run, lone_group, staleness: int, strategy: str
) -> None:
    expected, losses = by_hand(staleness, 3)
    seen: list[float] = []
    with make_run(staleness=staleness, strategy=strategy) as run:
        assert run.exactness == "exact"
        model = train(run, 3, seen)
        assert seen == losses
        assert same(expected, model), "after the loop all updates are there"


def test_looking_changes_nothing(make_run) -> None:
    """Evaluation, digests and exports see all updates, in the middle of a loop too."""
    x, y = data().tensors
    scores: list[float] = []

    def look(run: Any, model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            scores.append(F.cross_entropy(model(x), y).item())
        model.train()
        run.digest()

    with make_run(staleness=2) as run:
        train(run, 2, [], between=look)
        digest = run.digest()
    with make_run(staleness=2) as run:
        expected, _ = by_hand(2, 2)
        assert same(expected, train(run, 2, []))
        assert run.digest() == digest
        after = F.cross_entropy(expected.eval()(x), y).item()
    assert scores[-1] == pytest.approx(after), "with all updates"


def test_a_pass_without_gradients_beside_one_that_waits_for_its_backward_pass(make_run) -> None:
    def train_looking(run: Any, *, looks: bool) -> str:
        model = run.model(nn.Linear(4, 3))
        optimizer = run.optimizer(adam(model))
        for x, y in run.loader(data(), batch_size=8):
            loss = F.cross_entropy(model(x), y)
            if looks:
                with torch.no_grad():
                    assert F.cross_entropy(model(x), y) == loss
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return str(run.digest())

    digests = set()
    for looks in (False, True):
        with make_run(staleness=2) as run:
            digests.add(train_looking(run, looks=looks))
    assert len(digests) == 1


def test_loaded_weights_are_all_there_is(make_run, tmp_path) -> None:
    torch.save(net().state_dict(), tmp_path / "w.pt")
    seen: list[float] = []
    with make_run(staleness=3) as run:
        model = train(run, 1, seen)
        run.load(tmp_path / "w.pt")
        assert same(net(), model)
        x, y = (tensor[:8] for tensor in data().tensors)
        for batch in run.loader(data(), batch_size=8):
            with torch.enable_grad():
                assert F.cross_entropy(model.train()(batch[0]), batch[1]).item() == seen[0]
            break
        del x, y


def test_another_identity(make_run) -> None:
    methods = []
    for staleness in (None, 0, 1, 2):
        with make_run(staleness=staleness) as run:
            methods.append(run._session.context.identity.method)
    assert methods == ["exact", "exact", "exact, staleness=1", "exact, staleness=2"]
