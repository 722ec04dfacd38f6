"""What optimizers, their hooks and schedulers do once per step is the same on every layout."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.testing import assert_same
from tests.distributed.jobs import classes, quiet_run

pytestmark = pytest.mark.ranks(3)


def net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Flatten(), nn.Dropout(0.2), nn.Linear(30, 4))


def teach(last: int) -> tuple[str, int, float]:
    """Follow a model and its buffers by an average whose own forward passes are in training mode."""
    with quiet_run() as run:
        model = run.model(net())
        average = AveragedModel(copy.deepcopy(model), use_buffers=True)
        run.register("average", average)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))

        @torch.no_grad()
        def hook(*_: object) -> None:
            model[3].weight.div_(model[3].weight.norm(dim=1, keepdim=True))
            average.update_parameters(model)

        optimizer.register_step_post_hook(hook)
        data = run.loader(classes(24 + last, (6, 5)), batch_size=12, shuffle=True)
        for _ in run.epochs(2):
            for x, y in data:
                with torch.no_grad():
                    soft = average(x).softmax(1)
                logits = model(x)
                run.backward(F.cross_entropy(logits, y) + F.mse_loss(logits.softmax(1), soft))
                optimizer.step()
                optimizer.zero_grad()
        norms = model[3].weight.detach().norm(dim=1)
        return run.digest(), int(average.n_averaged), round(float(norms.mean()), 4)


@pytest.mark.parametrize("last", [2, 5])  # fewer samples than replicas, or not the same number each
def test_a_hook_acts_once_per_step(last: int) -> None:
    _, averaged, norm = assert_same(teach, [1, 2, 3], last, replicas=4)
    assert averaged == 6
    assert norm == 1.0


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


def noise(inside: int, after: int) -> str:
    """Step so often in each microbatch, and so often behind a batch."""
    with quiet_run() as run:
        model = run.model(net())
        optimizer = run.optimizer(Noisy(model.parameters(), lr=0.1))
        data = run.loader(classes(26, (6, 5)), batch_size=12, shuffle=True)
        for _ in run.epochs(2):
            for batch in run.batches(data):
                for x, y in batch:
                    run.backward(F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y))
                    if inside:
                        optimizer.step()
                        optimizer.zero_grad()
                    torch.rand(1)
                for _ in range(after):
                    optimizer.step()
                    optimizer.zero_grad()
        return run.digest()


def test_noise_of_a_step() -> None:
    inside = assert_same(noise, [1, 2, 3], 1, 0, replicas=4)
    assert assert_same(noise, [2], 0, 1, replicas=4) == inside
    twice, other = (assert_same(noise, [1, 3], 0, after, replicas=4) for after in (2, 3))
    assert len({inside, twice, other}) == 3
