"""What becomes of models that ranks have trained by themselves, checked against the papers' formulas."""

from __future__ import annotations

import copy

import torch

from lockstep.engine.strategies.local_sgd.outer import OuterOptimizer


def test_local_sgd_takes_the_mean() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    outer = OuterOptimizer([parameter], lr=1.0, momentum=0.0)
    with torch.no_grad():
        parameter.fill_(1.0)  # as a script may that loads other weights
    outer.begin()
    with torch.no_grad():
        parameter.copy_(torch.tensor([3.0, -1.0]))
    assert torch.equal(outer.outgoing()[0], torch.tensor([-2.0, 2.0]))
    outer.finish([torch.tensor([-3.0, 0.0])])
    assert torch.equal(parameter.data, torch.tensor([4.0, 1.0]))
    assert outer.state() == {}
    outer.load(OuterOptimizer([parameter], lr=0.7, momentum=0.9).state())  # of a run by diloco
    assert outer.state() == {}


def test_diloco_is_nesterovs_momentum_on_the_mean_way() -> None:
    """Two rounds, by hand: v = 0.9 v + d, x = x - 0.7 (d + 0.9 v)."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    outer = OuterOptimizer([parameter], lr=0.7, momentum=0.9)
    where, velocity = parameter.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for way in (torch.tensor([0.1, 0.3]), torch.tensor([-0.2, 0.05])):
        outer.begin()
        with torch.no_grad():
            parameter.add_(way)
        (gradient,) = outer.outgoing()
        assert torch.allclose(gradient, -way.double())
        outer.finish([gradient])
        velocity = 0.9 * velocity + gradient
        where = where - 0.7 * (gradient + 0.9 * velocity)
        assert torch.allclose(parameter.data, where)


def test_the_outer_momentum_comes_back() -> None:
    """A model that is restored, with new weights, goes on as the one that was saved."""
    ways = [torch.tensor([0.5]), torch.tensor([-0.25]), torch.tensor([1.0])]

    def go(outer: OuterOptimizer, parameter: torch.Tensor, way: torch.Tensor) -> None:
        outer.begin()
        with torch.no_grad():
            parameter.add_(way)
        outer.finish(outer.outgoing())

    whole = torch.nn.Parameter(torch.zeros(1))
    outer = OuterOptimizer([whole], lr=0.7, momentum=0.9)
    go(outer, whole, ways[0])
    saved, weights = copy.deepcopy(outer.state()), whole.detach().clone()
    restored = torch.nn.Parameter(torch.full((1,), 9.0))
    other = OuterOptimizer([restored], lr=0.7, momentum=0.9)
    with torch.no_grad():
        restored.copy_(weights)
    other.load(saved)
    for way in ways[1:]:
        go(outer, whole, way)
        go(other, restored, way)
    assert torch.equal(whole, restored)
    assert not torch.equal(whole.data, weights)
