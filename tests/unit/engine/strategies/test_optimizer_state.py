"""What optimizers hold beside their `state_dict` comes back: counters, buffers, optimizers inside."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from lockstep.engine.strategies import optimizer_state
from lockstep.state.checkpoint import state_codec


class Sam(Optimizer):
    """Of davda54: the optimizer inside has its groups, and a state that is not in `state_dict()`."""

    def __init__(self, params: Any, base: type[Optimizer], **settings: Any) -> None:
        super().__init__(params, settings)
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


class OwnLoading(Sam):
    """As it is published: groups are shared again when a state is loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Lookahead(Optimizer):
    """As it is mostly written: the state of the optimizer inside is its own, slow weights are keyed."""

    def __init__(self, optimizer: Optimizer, k: int = 2) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.k, self.count = optimizer, k, 0
        self.defaults, self.param_groups = optimizer.defaults, optimizer.param_groups
        self.fast_state, self.state = optimizer.state, defaultdict(dict)
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.buffers = [
            [p.detach().clone() for p in group["params"]] for group in self.param_groups
        ]

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)


class Counting(SGD):
    """Counts its steps, and keeps what it has seen."""

    count = 0

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.norms: deque[float] = deque(maxlen=2)
        self.mean = torch.zeros(2)
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.views = [p.detach().view(-1) for p in self.params]
        self.rule: Callable[[float], float] = lambda rate: rate

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.norms.append(
            float(self.params[0].grad.norm()) if self.params[0].grad is not None else 0
        )
        self.mean += self.count
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count + 0.01 * sum(self.norms)
        super().step()


class Several(Optimizer):
    """Optimizers in a list, for parts of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        own = self.param_groups[0]["params"]
        self.optimizers = [SGD(own[:1], lr=0.1, momentum=0.9), Adam(own[1:], lr=0.1)]

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sam": lambda params: Sam(params, SGD, lr=0.1, momentum=0.9),
    "sam with adam": lambda params: Sam(params, Adam, lr=0.1),
    "its own loading": lambda params: OwnLoading(params, SGD, lr=0.1, momentum=0.9),
    "lookahead": lambda params: Lookahead(Adam(params, lr=0.1)),
    "lookahead of sam": lambda params: Lookahead(Sam(params, SGD, lr=0.1, momentum=0.9)),
    "counting": lambda params: Counting(params, lr=0.1, momentum=0.9),
    "several": Several,
}


def steps(net: nn.Module, optimizer: Optimizer, count: range) -> None:
    for number in count:
        for p in net.parameters():
            p.grad = torch.full_like(p, 0.1 * (number + 1)) + p.detach()
        optimizer.step()


def saved(optimizer: Optimizer) -> dict[str, Any]:
    """Return all of its state, as it is written and read."""
    state = {"own": optimizer.state_dict(), "extras": optimizer_state.capture_extras(optimizer)}
    text, tensors = state_codec.flatten(state)
    copies = {name: one.clone() for name, one in tensors.items()}
    return state_codec.rebuild(text, copies.__getitem__)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_one_goes_on_as_the_one_before(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = KINDS[kind](net.parameters())
    steps(net, optimizer, range(5))
    state, weights = saved(optimizer), {n: v.clone() for n, v in net.state_dict().items()}
    steps(net, optimizer, range(5, 9))

    again = nn.Linear(3, 2)
    other = KINDS[kind](again.parameters())
    for _ in range(2):  # when the script comes to its first loop, and when it has arrived
        again.load_state_dict(weights)
        optimizer_state.load(other, state["own"])
        optimizer_state.load_extras(other, saved_again := _copy(state)["extras"])
        assert saved_again
    steps(again, other, range(5, 9))
    assert all(map(torch.equal, net.state_dict().values(), again.state_dict().values()))


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    text, tensors = state_codec.flatten(state)
    return state_codec.rebuild(text, {n: t.clone() for n, t in tensors.items()}.__getitem__)


@pytest.mark.parametrize("kind", ["sam", "its own loading", "lookahead"])
def test_groups_stay_shared(kind: str) -> None:
    """A scheduler changes the rate of the outer one, which is the inner one's as well."""
    net = nn.Linear(3, 2)
    optimizer: Any = KINDS[kind](net.parameters())
    inner = optimizer.optimizer if kind == "lookahead" else optimizer.base_optimizer
    states = getattr(optimizer, "fast_state", inner.state)
    steps(net, optimizer, range(2))
    state = saved(optimizer)
    optimizer_state.load(optimizer, state["own"])
    optimizer_state.load_extras(optimizer, state["extras"])
    optimizer.param_groups[0]["lr"] = 0.7
    assert inner.param_groups[0]["lr"] == 0.7
    assert inner.param_groups is optimizer.param_groups
    assert inner.state is states


def test_parameters_and_code_are_not_saved() -> None:
    optimizer: Any = Counting(nn.Linear(3, 2).parameters(), lr=0.1)
    views = list(optimizer.views)
    steps(nn.Linear(1, 1), optimizer, range(1))
    values = optimizer_state.capture_extras(optimizer)["values"]
    assert sorted(values) == ["count", "mean", "norms"]
    optimizer_state.load_extras(optimizer, saved(optimizer)["extras"])
    assert optimizer.views == views
    assert optimizer.norms.maxlen == 2


@pytest.mark.parametrize("kind", [SGD, Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_torchs_own_have_nothing_besides(kind: Any) -> None:
    net = nn.Linear(3, 2)
    optimizer = kind(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps(net, optimizer, range(2))
    assert optimizer_state.capture_extras(optimizer) == {}


def test_an_optimizer_that_the_run_knows_is_saved_once() -> None:
    optimizer: Any = Several(nn.Linear(3, 2).parameters())
    known = {id(one) for one in optimizer.optimizers}
    assert optimizer_state.capture_extras(optimizer, known) == {}
