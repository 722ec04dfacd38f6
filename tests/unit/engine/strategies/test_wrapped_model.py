"""Models over the replicas of one rank: sums in tree order, and what would not mean the same elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.layout.tree import total
from lockstep.engine.strategies.single import FrozenModel, SingleModel
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import ModelError, StepError
from tests.unit.contexts import model_context


def microbatch(replica: int, replicas: int, size: int = 3, total_: int = 12) -> Microbatch:
    return Microbatch(
        loader=0,
        epoch=0,
        round=0,
        step=0,
        replica=replica,
        size=size,
        total=total_,
        first=replica == 0,
        last=replica == replicas - 1,
        indices=np.arange(max(size, 1)),
    )


def backward(model: WrappedModel, m: Microbatch, loss: torch.Tensor) -> None:
    model.before_backward(m)
    loss.backward(torch.tensor(m.weight))
    model.after_backward(m)


def stepped(model: WrappedModel) -> None:
    """What an optimizer of the whole model says."""
    model.optimized |= {id(p) for p in model.parameters}
    model.stepped(model.optimized)


def batch(
    model: WrappedModel,
    inputs: torch.Tensor,
    body: Callable[[int, torch.Tensor], Any],
    at_end: Callable[[], None] = lambda: None,
) -> None:
    for replica, x in enumerate(inputs):
        m = microbatch(replica, len(inputs))
        model.microbatch_begins(m)
        loss = body(replica, x)
        if loss is not None:
            backward(model, m, loss)
        if m.last:
            at_end()
        model.microbatch_ends(m, left=False)


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def by_hand(
    net: nn.Module, inputs: torch.Tensor, loss: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """Each replica's gradients on a copy of its own, summed in tree order."""
    each = []
    for x in inputs:
        twin = copy.deepcopy(net)
        loss(twin(x)).backward(torch.tensor(1 / len(inputs)))
        each.append([p.grad for p in twin.parameters()])
    return [total(list(column), torch.add) for column in zip(*each, strict=True)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
def test_gradients_are_the_trees_sum(net: nn.Module, replicas: int) -> None:
    inputs = torch.randn(replicas, 3, 5) * 10.0 ** torch.arange(replicas).view(-1, 1, 1)
    expected = by_hand(net, inputs, lambda y: y.square().mean())
    model = SingleModel(net, model_context(replicas))
    assert model.wrapped is net
    for _ in range(2):
        for replica, x in enumerate(inputs):
            m = microbatch(replica, replicas, total_=3 * replicas)
            model.microbatch_begins(m)
            backward(model, m, model.wrapped(x).square().mean())
            model.microbatch_ends(m, left=False)
        assert all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected, strict=True))
        net.zero_grad()


def test_a_left_to_right_sum_would_have_other_bits(net: nn.Module) -> None:
    inputs = torch.randn(7, 3, 5) * 10.0 ** torch.arange(7).view(-1, 1, 1)
    expected = by_hand(net, inputs, lambda y: y.square().mean())
    for x in inputs:
        net(x).square().mean().backward(torch.tensor(1 / 7))
    assert not all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected, strict=True))


def test_a_parameter_that_some_replicas_use() -> None:
    net = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    net.forward = lambda x, which: net[which](x)
    model = SingleModel(net, model_context(3))
    inputs = torch.randn(3, 3, 2)
    batch(model, inputs, lambda replica, x: net(x, int(replica == 1)).mean())
    each = [torch.autograd.grad(net[r == 1](x).mean(), net[r == 1].weight, torch.tensor(0.25))[0]
            for r, x in enumerate(inputs)]  # fmt: skip
    assert torch.equal(net[0].weight.grad, each[0] + each[2])
    assert torch.equal(net[1].weight.grad, each[1])


def test_a_parameter_that_no_replica_uses_has_no_gradient(net: nn.Module) -> None:
    net.extra = nn.Linear(2, 2)
    net.forward = lambda x: net[2](net[1](net[0](x)))
    batch(SingleModel(net, model_context(2)), torch.randn(2, 3, 5), lambda _, x: net(x).mean())
    assert net.extra.weight.grad is None
    assert net[0].weight.grad is not None


def test_backward_twice_with_one_replica_adds_as_plain_pytorch_does(net: nn.Module) -> None:
    model, m, x = SingleModel(net, model_context(1)), microbatch(0, 1), torch.randn(3, 5)
    model.microbatch_begins(m)
    for _ in range(2):
        backward(model, m, net(x).mean())
    stepped(model)
    once = torch.autograd.grad(net(x).mean(), net[0].weight, torch.tensor(0.25))[0]
    assert torch.equal(net[0].weight.grad, once + once)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda net: setattr(net, "more", nn.Linear(1, 1)), "new: more.weight, more.bias"),
        (lambda net: setattr(net, "0", nn.Linear(5, 4)), "replaced: 0.weight, 0.bias"),
        (lambda net: net[0].register_parameter("x", nn.Parameter(torch.zeros(1))), "new: 0.x"),
        (lambda net: net[2].requires_grad_(False), "frozen or removed: 2.weight, 2.bias"),
    ],
    ids=["a part more", "another part", "a parameter more", "a part frozen"],
)
def test_parameters_that_changed_since_the_run_has_the_model(
    net: nn.Module, change: Any, told: str
) -> None:
    model, m = SingleModel(net, model_context(2)), microbatch(0, 2)
    model.microbatch_begins(m)
    change(net)
    with pytest.raises(ModelError, match="trainable parameters; it had 4") as caught:
        model.microbatch_begins(m)
    assert caught.value.message.endswith(f" ({told})")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        raise ValueError("broken")


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_backward_pass_after_one_that_an_exception_ended(net: nn.Module, replicas: int) -> None:
    """Some gradients may be with other ranks, in memory that the next pass would use."""
    model, m = SingleModel(net, model_context(replicas)), microbatch(0, replicas)
    model.microbatch_begins(m)
    with pytest.raises(ValueError, match="broken"):
        backward(model, m, net[2](Broken.apply(net[:2](torch.randn(3, 5)))).mean())
    model.microbatch_begins(m)
    if replicas == 1:
        backward(model, m, net(torch.randn(3, 5)).mean())
    else:
        with pytest.raises(StepError, match="Sequential was interrupted by an exception"):
            backward(model, m, net(torch.randn(3, 5)).mean())


@pytest.mark.parametrize("replica", [0, 1])
def test_backward_twice_withseveral_replicas(net: nn.Module, replica: int) -> None:
    model = SingleModel(net, model_context(2))
    for number in range(replica + 1):
        m = microbatch(number, 2)
        model.microbatch_begins(m)
        backward(model, m, net(torch.randn(3, 5)).mean())
        if number < replica:
            model.microbatch_ends(m, left=False)
    with pytest.raises(StepError, match="called twice for Sequential"):
        backward(model, m, net(torch.randn(3, 5)).mean())


def test_the_next_batch_may_go_backward_again(net: nn.Module) -> None:
    model = SingleModel(net, model_context(2))
    for _ in range(3):
        batch(model, torch.randn(2, 3, 5), lambda _, x: net(x).mean())
        assert all(parameter.grad is not None for parameter in net.parameters())
        net.zero_grad()


def test_gradients_of_an_earlier_batch_are_named_at_the_step(net: nn.Module) -> None:
    model = SingleModel(net, model_context(2))
    inputs = torch.randn(2, 3, 5)
    batch(model, inputs, lambda _, x: net(x).mean(), at_end=lambda: stepped(model))
    with pytest.raises(StepError, match="gradients of an earlier batch") as caught:
        batch(model, inputs, lambda _, x: net(x).mean(), at_end=lambda: stepped(model))
    assert "zero_grad" in caught.value.hint


def test_gradients_that_have_not_met_are_named_at_the_step(net: nn.Module) -> None:
    model = SingleModel(net, model_context(2))
    m = microbatch(0, 2)
    model.microbatch_begins(m)
    net(torch.randn(3, 5)).mean().backward()
    with pytest.raises(StepError, match="were not summed") as caught:
        stepped(model)
    assert "run.backward" in caught.value.hint


def test_gradients_that_are_added_to_those_that_have_met_are_named_at_the_step(
    net: nn.Module,
) -> None:
    model = SingleModel(net, model_context(2))
    inputs = torch.randn(2, 3, 5)
    batch(model, inputs, lambda _, x: net(x).mean(), at_end=lambda: stepped(model))
    net.zero_grad()
    net(inputs).sum().backward()  # between batches, for inputs that are hard, say
    net.zero_grad()
    m = microbatch(0, 2)
    model.microbatch_begins(m)
    losses = net(inputs[0]).mean(), net(inputs[0]).square().mean()
    backward(model, m, losses[0])
    losses[1].backward()
    with pytest.raises(StepError, match="were not summed"):
        stepped(model)


@pytest.mark.parametrize("replicas", [1, 2])
def test_use_after_a_step(net: nn.Module, replicas: int) -> None:
    model = SingleModel(net, model_context(replicas))
    m = microbatch(0, replicas)
    model.microbatch_begins(m)
    backward(model, m, net(torch.randn(3, 5)).mean())
    stepped(model)
    with torch.no_grad():
        net(torch.randn(3, 5))
    if replicas == 1:
        net(torch.randn(3, 5))
    else:
        with pytest.raises(StepError, match="used after optimizer"):
            net(torch.randn(3, 5))


@pytest.mark.parametrize("skipped", [0, 1, 2, 3])
def test_a_replica_without_a_backward_pass_is_named(net: nn.Module, skipped: int) -> None:
    """On as many ranks as replicas the others would wait for it for ever."""
    model = SingleModel(net, model_context(4))
    inputs = torch.randn(4, 3, 5)
    with pytest.raises(StepError):  # at the latest when the step is asked for
        batch(
            model,
            inputs,
            lambda replica, x: None if replica == skipped else net(x).mean(),
            at_end=lambda: stepped(model),
        )


def test_a_batch_without_any_backward_pass_is_fine(net: nn.Module) -> None:
    model = SingleModel(net, model_context(4))
    batch(model, torch.randn(4, 3, 5), lambda *_: None)
    batch(model, torch.randn(4, 3, 5), lambda _, x: net(x).mean())
    assert net[0].weight.grad is not None


def test_buffers_are_replica_zeros() -> None:
    net = nn.BatchNorm1d(2)
    twin = copy.deepcopy(net)
    model = SingleModel(net, model_context(3))
    for _ in range(2):
        inputs = torch.randn(3, 4, 2)
        twin(inputs[0])
        batch(model, inputs, lambda _, x: net(x).square().mean())
        assert torch.equal(net.running_mean, twin.running_mean)
        assert torch.equal(net.running_var, twin.running_var)
        assert net.num_batches_tracked == twin.num_batches_tracked
        net.zero_grad()


def test_buffers_of_a_part_in_training_mode() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2)).eval()
    net[0].train()
    twin = copy.deepcopy(net)
    inputs = torch.randn(2, 4, 2)
    twin(inputs[0])
    batch(SingleModel(net, model_context(2)), inputs, lambda _, x: net(x).square().mean())
    assert torch.equal(net[0].running_mean, twin[0].running_mean)


def test_a_frozen_model_has_buffers_but_no_gradients() -> None:
    net = nn.BatchNorm1d(2).requires_grad_(False)
    twin = copy.deepcopy(net)
    model = FrozenModel(net, model_context(2), {})
    inputs = torch.randn(2, 4, 2)
    twin(inputs[0])
    batch(model, inputs, lambda _, x: [None, net(x)][0])
    assert model.wrapped is net
    assert model.parameters == []
    assert not model.used
    assert torch.equal(net.running_mean, twin.running_mean)
    model.close()


# --- the same through DistributedDataParallel, on a group of one rank -----------------------------


class Branches(nn.Module):
    """Batch statistics, dropout, a part that only some inputs use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.left, self.right, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(x))
        return self.left(x) if x.sum() > 0 else self.right(x)


def train(run: Any, model_settings: dict[str, Any], replicas: int) -> tuple[str, list[str]]:
    from torch.utils.data import TensorDataset

    with run:
        first = run.model(Branches(), **model_settings)
        second = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(
            torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
        )
        data = TensorDataset(torch.randn(15 * replicas - 1, 6))
        loader = run.loader(data, batch_size=4 * replicas, shuffle=True)
        for _ in run.epochs(2):
            for (x,) in loader:
                run.backward(second(first(x)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return run.digest(), list(first.state_dict())


@pytest.mark.parametrize("exchange", ["shared-memory", "tree", "native"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ddp_gives_the_bits_of_a_single_rank(
    make_run, lone_group_after, exchange, replicas
) -> None:
    alone = train(make_run(replicas=replicas), {}, replicas)
    lone_group_after()
    run = make_run(replicas=replicas, exchange=exchange)
    assert run.exchange == exchange
    assert train(run, {"bucket_cap_mb": 0.0001}, replicas) == alone


@pytest.mark.parametrize(
    "settings",
    [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1}, {"broadcast_buffers": True}],
)
def test_ddp_keywords_do_not_change_bits(make_run, lone_group_after, settings) -> None:
    alone = train(make_run(replicas=2), settings, 2)
    lone_group_after()
    assert train(make_run(replicas=2), settings, 2) == alone


def test_ddp_names_unused_parameters_where_they_are_not_looked_for(make_run, lone_group) -> None:
    with pytest.raises(ModelError, match="not used in the loss, with find_unused_parameters=False"):
        train(make_run(replicas=2), {"find_unused_parameters": False}, 2)


@pytest.fixture
def lone_group_after(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Make the group of one rank when it is called, so that a run without a group can go first."""
    return lambda: request.getfixturevalue("lone_group")
