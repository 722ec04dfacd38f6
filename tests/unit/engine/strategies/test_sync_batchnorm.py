"""BatchNorm over all ranks' samples: its arithmetic, ranks as turns within this process (A14).

Ranks that exchange messages are in tests/distributed/test_sync_batchnorm.py.
"""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.engine.layout.tree import total
from lockstep.engine.recovery.state import State
from lockstep.engine.strategies.sync_batchnorm import (
    Ranks,
    SyncedBatchNorm,
    _merge,
    _statistics,
    _unpack,
    convert,
    fold,
    layers,
)
from lockstep.engine.training.batchnorm import synchronise
from lockstep.errors import ExactnessError, ModelError
from lockstep.settings import Settings

ALONE = Ranks(None)


def merged(parts: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """Merge the statistics of parts; None is a stand-in."""
    first, *rest = [
        _statistics(torch.zeros(1, 3) if x is None else x, counts=x is not None) for x in parts
    ]
    for other in rest:
        first = _merge(first, other)
    return _unpack(first)


@pytest.mark.parametrize("sizes", [[4], [4, 4], [1, 7, 2], [5, 0, 3], [0, 0, 6], [0, 1]])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_merged_statistics_are_those_of_all_samples(sizes: list[int], offset: float) -> None:
    parts = [torch.randn(n, 3).double() + offset if n else None for n in sizes]
    count, mean, squares = merged(parts)
    everything = torch.cat([p for p in parts if p is not None])
    assert count == len(everything)
    torch.testing.assert_close(mean, everything.mean(0))
    expected = (everything - everything.mean(0)).square().sum(0)
    torch.testing.assert_close(squares, expected, rtol=1e-9, atol=1e-6)


def test_merging_nothing_with_nothing_gives_nothing() -> None:
    count, mean, squares = merged([None, None])
    assert count == 0
    assert torch.equal(mean, torch.zeros(3).double())
    assert torch.equal(squares, torch.zeros(3).double())


def test_statistics_of_a_coarse_type_are_computed_in_a_fine_one() -> None:
    x = torch.full((4096, 1), 1.0).half()
    x[::2] = 3.0
    count, mean, squares = _unpack(_statistics(x, counts=True))
    assert (count, mean.item(), squares.item()) == (4096, 2.0, 4096.0)


class Kernels(TorchDispatchMode):
    """Counts the operations that compute or move something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ranks", range(1, 18))
def test_levels_have_the_bits_of_the_tree(ranks: int) -> None:
    sizes = [(3 * rank) % 7 for rank in range(ranks)]
    parts = [
        _statistics(torch.randn(size or 1, 5) * 10.0 ** (rank % 4), counts=size > 0)
        for rank, size in enumerate(sizes)
    ]
    for merge in (_merge, torch.add):
        expected = total(parts, merge)
        assert torch.equal(
            fold(torch.stack(parts), merge).view(torch.int64), expected.view(torch.int64)
        )


def test_a_level_of_the_tree_is_one_merge() -> None:
    rows = torch.rand(8, 2 * 64 + 1).double()
    with Kernels() as kernels:
        fold(rows, _merge)
    assert kernels.count == 3 * 11, "seven merges one after the other are 98"


class RankOrder(Ranks):
    """The gathered values of all ranks, which were computed before: one rank is looked at."""

    def __init__(self, others: list[torch.Tensor], counts: bool = True) -> None:
        super().__init__(None, lambda: counts)
        self.size = 1 + len(others)
        self._others = others

    def fold(self, own: torch.Tensor, merge: Any) -> torch.Tensor:
        for other in self._others:
            if other.numel() != own.numel():  # a backward pass: the others have no gradient
                return own
            own = merge(own, other)
        return own


@pytest.mark.parametrize("counts", [True, False])
def test_derivatives_are_those_of_the_values(counts: bool) -> None:
    """Of the loss of this rank's samples alone; as others are constant here, it can be differentiated."""
    other = torch.randn(5, 3).double()
    x = torch.randn(4 if counts else 1, 3).double().requires_grad_()
    layer = convert(
        nn.BatchNorm1d(3, track_running_stats=False).double(),
        RankOrder([_statistics(other, counts=True)], counts),
    )
    nn.init.uniform_(layer.weight, 0.5, 2)
    assert torch.autograd.gradcheck(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)),
        (x, layer.weight, layer.bias),
    )
    both = torch.cat([x, other]) if counts else other
    scaled = (x - both.mean(0)) / (both.var(0, correction=0) + layer.eps).sqrt()
    torch.testing.assert_close(layer(x), scaled * layer.weight + layer.bias)


def test_one_value_in_all_is_refused_as_batchnorm_refuses_it() -> None:
    nothing = _statistics(torch.zeros(1, 3), counts=False)
    layer = convert(nn.BatchNorm1d(3), RankOrder([nothing]))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(torch.zeros(1, 3))
    layer(torch.zeros(2, 3))
    layer.eval()(torch.zeros(1, 3))
    one = convert(nn.BatchNorm1d(3), RankOrder([_statistics(torch.ones(1, 3), counts=True)]))
    one(torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d, (4, 3, 2, 2)), (nn.BatchNorm2d, (4, 3)), (nn.BatchNorm3d, (4, 3))],
)
def test_the_kind_of_input_is_still_checked(layer: type[nn.Module], shape: tuple[int, ...]) -> None:
    synced = convert(layer(3), RankOrder([torch.zeros(7)]))
    with pytest.raises(ValueError, match=r"expected .* input"):
        synced(torch.zeros(shape))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
        self.shared = nn.BatchNorm1d(4, affine=False)
        self.again = self.shared
        self.theirs = nn.SyncBatchNorm(4, track_running_stats=False)
        self.body[1].eval()
        self.calls = 0
        self.shared.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.theirs(self.again(self.shared(self.body(x).mean((2, 3)))))


def test_converting_keeps_everything_but_the_statistics() -> None:
    net = Net()
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    modes = {name: module.training for name, module in net.named_modules()}
    converted = convert(net, ALONE)
    assert converted is net
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert modes == {name: module.training for name, module in net.named_modules()}
    assert net.again is net.shared
    assert net.body[1].momentum is None
    assert [layer.kind.__name__ for layer in layers(net)] == [
        "BatchNorm2d",
        "BatchNorm1d",
        "SyncBatchNorm",
    ]
    assert convert(net, ALONE) is net  # nothing is left to convert
    net(torch.randn(5, 1, 4, 4))
    assert net.calls == 2


def test_a_layer_that_is_the_whole_model() -> None:
    norm = nn.BatchNorm1d(3)
    synced = convert(norm, ALONE)
    assert isinstance(synced, SyncedBatchNorm)
    assert synced.weight is norm.weight


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
def test_alone_it_is_batchnorm_to_the_bit(settings: dict) -> None:
    plain = nn.BatchNorm1d(3, **settings)
    synced = convert(copy.deepcopy(plain), ALONE)
    for training in (True, False):
        plain.train(training)
        synced.train(training)
        x = torch.randn(6, 3)
        assert torch.equal(plain(x), synced(x))
    assert all(map(torch.equal, plain.state_dict().values(), synced.state_dict().values()))


def test_a_layer_without_parameters_yet() -> None:
    with pytest.raises(
        ModelError, match="layer 0, a LazyBatchNorm1d, has no parameters yet"
    ) as caught:
        convert(nn.Sequential(nn.LazyBatchNorm1d()), ALONE)
    assert "pass one batch" in caught.value.hint


class Own(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_a_layer_that_computes_in_its_own_way() -> None:
    with pytest.raises(ModelError, match=r"layer part\.0, a Own, has a forward pass of its own"):
        convert(nn.ModuleDict({"part": nn.Sequential(Own(3))}), ALONE)


def test_a_group_of_some_ranks() -> None:
    with pytest.raises(ModelError, match=r"the model itself.*has a process group of its own"):
        convert(nn.SyncBatchNorm(3, process_group=object()), ALONE)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_inputs_of_reduced_precision(kind: torch.dtype) -> None:
    """As under autocast: parameters and statistics stay in fp32, outputs are like the input."""
    x = torch.randn(6, 3)
    other = torch.randn(5, 3)
    layer = convert(nn.BatchNorm1d(3), RankOrder([_statistics(other, counts=True)]))
    low = x.to(kind).requires_grad_()
    y = layer(low)
    y.float().pow(3).sum().backward()
    assert y.dtype == low.grad.dtype == kind
    assert layer.weight.grad.dtype == torch.float32
    exact = x.to(kind).float().requires_grad_()
    again = convert(nn.BatchNorm1d(3), RankOrder([_statistics(other, counts=True)]))
    again(exact).pow(3).sum().backward()
    torch.testing.assert_close(layer.weight.grad, again.weight.grad, rtol=0.05, atol=0.05)
    torch.testing.assert_close(low.grad.float(), exact.grad, rtol=0.05, atol=0.05)
    torch.testing.assert_close(layer.running_var, again.running_var)


def test_a_memory_format_is_kept() -> None:
    other = _statistics(torch.randn(4, 3), counts=True)
    layer = convert(nn.BatchNorm2d(3), RankOrder([other]))
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, layer(x.detach().contiguous()))


def test_copies_and_files() -> None:
    ranks = RankOrder([torch.zeros(7)])
    synced = convert(nn.BatchNorm1d(3), ranks)
    assert copy.deepcopy(synced).ranks is ranks
    file = io.BytesIO()
    torch.save(synced, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).ranks.size == 1


# --- through a run --------------------------------------------------------------------------------


def test_one_rank_with_one_replica(make_run) -> None:
    with make_run() as run:
        model = run.model(run.sync_batchnorm(Net()))
        assert run.exactness == "exact"
        model(torch.randn(5, 1, 4, 4))


def test_more_replicas_than_ranks_with_exact(make_run) -> None:
    with (
        make_run(replicas=2) as run,
        pytest.raises(
            ExactnessError, match=r"2 replicas on 1 rank\(s\).*expected a rank for each"
        ) as caught,
    ):
        run.sync_batchnorm(Net())
    assert "start 2 ranks" in caught.value.hint
    assert "--no-exact" in caught.value.hint


def test_more_replicas_than_ranks_are_another_mathematics(make_run, capsys) -> None:
    with make_run(replicas=2, exact=False, progress=False) as run:
        run.model(run.sync_batchnorm(Net()))
        assert run.exactness == "approximate"
    assert "lockstep: test: approximate, by how Net is wrapped" in capsys.readouterr().err


def test_what_belongs_to_the_run_already(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        with pytest.raises(ModelError, match="belongs to the run already") as caught:
            run.sync_batchnorm(model)
        assert caught.value.hint == "model = run.model(run.sync_batchnorm(model))"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "pipeline"}, "strategy=pipeline, which cuts each replica's share to pieces"),
        (
            {"strategy": "ps", "staleness": 2},
            "staleness=2, under which workers run without each other",
        ),
    ],
)
def test_where_ranks_do_not_compute_together(settings: dict, message: str) -> None:
    context: Any = SimpleNamespace(settings=Settings(name="x", exact=False, **settings))
    loop: Any = None
    with pytest.raises(ModelError, match=message) as caught:
        synchronise(context, State(), loop, Net())
    assert caught.value.hint


@pytest.mark.parametrize("strategy", ["auto", "dp", "fsdp"])
def test_pytorchs_own_layer_has_to_be_converted(make_run, lone_group, strategy: str) -> None:
    with make_run(strategy=strategy) as run:
        with pytest.raises(ModelError, match="the layer 1 is PyTorch's SyncBatchNorm") as caught:
            run.model(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
        assert "run.sync_batchnorm(model)" in caught.value.hint


def test_what_is_no_module(make_run) -> None:
    with make_run() as run, pytest.raises(ModelError, match="given a list; expected a Module"):
        run.sync_batchnorm([nn.BatchNorm1d(2)])
