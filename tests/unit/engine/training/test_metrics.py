"""Metrics: each sample counted once, integers exact, shapes checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.engine.data.build import LoaderSettings, build
from lockstep.engine.data.loader import Loader
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import total
from lockstep.engine.training import metrics as metrics_module
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.metrics import Metrics
from lockstep.errors import StepError

VALUES = torch.arange(10) ** 2


def make(
    replicas=4, *, batch_size=4, ranks=1, rank=0, values=VALUES, **more
) -> tuple[Metrics, Loader]:
    loop = Loop(0, replicas, [])
    settings = LoaderSettings(batch_size=batch_size, **more)
    source = build(TensorDataset(values), settings, replicas, block(replicas, ranks, rank), 0)
    loader = Loader(source, loop, number=0, batch_size=batch_size, device=None)
    return Metrics(loop, replicas, block(replicas, ranks, rank), None), loader


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("grad", [True, False], ids=["with stand-ins", "without"])
def test_vectors_scalars_and_booleans(replicas: int, grad: bool) -> None:
    metrics, loader = make(replicas)
    with torch.set_grad_enabled(grad):
        assert metrics.sum(x for (x,) in loader) == 285
        assert metrics.mean(x for (x,) in loader) == 28.5
        assert metrics.mean(x.double() for (x,) in loader) == 28.5
        assert metrics.mean(x.double().mean() for (x,) in loader) == pytest.approx(28.5)
        assert metrics.mean(x.double().mean().item() for (x,) in loader) == pytest.approx(28.5)
        assert metrics.mean(x > 20 for (x,) in loader) == 0.5
        assert metrics.sum(x > 20 for (x,) in loader) == 5
        assert metrics.sum(1 for _ in loader) == {1: 3, 2: 6, 3: 8, 4: 10}[replicas]


def test_integers_are_exact() -> None:
    large = torch.tensor([2**60, 1, 2**60, 3])
    metrics, loader = make(2, values=large)
    result = metrics.sum(x for (x,) in loader)
    assert (result, type(result)) == (2**61 + 4, int)
    small = metrics.sum((x % 4).to(torch.uint8) + 255 - 3 for (x,) in loader)
    assert (small, type(small)) == (252 * 4 + 4, int)
    assert type(metrics.sum(x > 0 for (x,) in loader)) is int


def test_floats_are_summed_in_double_precision() -> None:
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])
    metrics, loader = make(1, values=values)
    assert metrics.sum(x for (x,) in loader) == 2.0
    half = torch.full((4,), 0.1, dtype=torch.float16)
    assert metrics.sum(half[: len(x)] for (x,) in loader) == sum(half.tolist())


def test_the_sum_over_replicas_is_in_tree_order() -> None:
    values = torch.randn(7, dtype=torch.float64) * 10.0 ** torch.arange(7)
    metrics, loader = make(7, batch_size=7, values=values)
    assert metrics.sum(x for (x,) in loader) == total(values.tolist(), lambda a, b: a + b)
    assert metrics.sum(x.sum() for (x,) in loader) == total(values.tolist(), lambda a, b: a + b)


def test_mappings() -> None:
    metrics, loader = make(3)
    result = metrics.mean({"value": x, "even": x % 2 == 0, "one": 1.0} for (x,) in loader)
    assert result == {"value": 28.5, "even": 0.5, "one": 1.0}
    result = metrics.sum({"value": x, "count": torch.ones(len(x))} for (x,) in loader)
    assert result == {"value": 285, "count": 10.0}


@pytest.mark.parametrize("call", ["mean", "sum"])
def test_names_in_mappings_are_text(call: str) -> None:
    for key in (0, ("val", "loss")):
        metrics, loader = make(3)
        with pytest.raises(StepError, match=r"has the key .*expected names of type str") as caught:
            getattr(metrics, call)({key: x} for (x,) in loader)
        assert f"str({key!r})" in str(caught.value.hint)


def test_stand_ins_count_nothing() -> None:
    metrics, loader = make(4, values=torch.arange(6))
    seen: list[int] = []

    def items():
        for (x,) in loader:
            seen.append(len(x))
            yield torch.full((len(x),), 7.0)

    assert metrics.mean(items()) == 7.0
    assert sum(seen) == 8, "two stand-ins were shown"
    assert metrics.sum(items()) == 42.0


def test_a_stand_in_that_is_not_a_number_counts_nothing_either() -> None:
    metrics, loader = make(4, values=torch.arange(5))
    loop = metrics._loop
    assert metrics.mean(math.nan if loop.microbatch.size == 0 else 1.0 for _ in loader) == 1.0


def test_rows_of_values() -> None:
    metrics, loader = make(2, values=torch.ones(6, 3))
    assert metrics.sum(x for (x,) in loader) == 18.0


@pytest.mark.parametrize("value", [np.float32(0.1), np.float64(0.1)])
def test_numpys_floats_are_floats(value: Any) -> None:
    metrics, loader = make(3)
    mean = metrics.mean(value for _ in loader)
    assert isinstance(mean, float)
    assert mean == pytest.approx(float(value), rel=1e-12)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_gather_gives_rows_in_dataset_order(replicas: int, shuffle: bool, grad: bool) -> None:
    metrics, loader = make(replicas, shuffle=shuffle)
    with torch.set_grad_enabled(grad):
        assert torch.equal(metrics.gather(x for (x,) in loader), VALUES)
        rows = metrics.gather(torch.stack([x, -x], dim=1) for (x,) in loader)
    assert torch.equal(rows, torch.stack([VALUES, -VALUES], dim=1))


def gather_from_ranks(ranks: int, items: Any, replicas: int, **settings: Any) -> torch.Tensor:
    """Gather as `ranks` ranks would, each of which knows its own part only."""
    parts: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_module, "of_all", lambda own, _: parts.append(own) or [own])
        for rank in range(ranks):
            metrics, loader = make(replicas, ranks=ranks, rank=rank, **settings)
            metrics.gather(items(metrics, loader))
        patch.setattr(metrics_module, "of_all", lambda *_: parts)
        return make(replicas, **settings)[0].gather(iter(()))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gather_leaves_out_stand_ins(ranks: int) -> None:
    values = torch.arange(9) ** 2
    found = gather_from_ranks(ranks, lambda _, loader: (x for (x,) in loader), 4, values=values)
    assert torch.equal(found, values)


def test_gathered_repetitions_have_one_order_on_every_layout() -> None:
    """A sampler may draw a sample twice, and a model may then say something else about it."""

    def items(metrics: Metrics, loader: Loader) -> Any:
        for (x,) in loader:
            m = metrics._loop.microbatch
            yield torch.full((len(x),), 10 * m.step + m.replica)

    one, two = (
        gather_from_ranks(ranks, items, 2, sampler=[0, 1, 3, 2, 3, 0, 1, 2]).tolist()
        for ranks in (1, 2)
    )
    assert one == [0, 10, 0, 11, 1, 11, 1, 10]
    assert two == one


@pytest.mark.parametrize("call", ["mean", "sum"])
def test_shapes_that_do_not_fit(call: str) -> None:
    metrics, loader = make(1)
    with pytest.raises(
        StepError, match=r"a metric of shape \(3,\) for a microbatch of 4"
    ) as caught:
        getattr(metrics, call)(torch.zeros(3) for _ in loader)
    assert caught.value.hint
    metrics, loader = make(1)
    with pytest.raises(StepError, match=r"shape \(\)"):
        metrics.gather(torch.zeros(()) for _ in loader)


def test_values_that_come_from_no_loop() -> None:
    metrics, loader = make(1)
    with pytest.raises(StepError, match="outside of a loop over a loader"):
        metrics.mean([x.sum() for (x,) in loader])
    metrics, loader = make(1)
    with pytest.raises(StepError, match="saw no samples"):
        metrics.mean([])
    with pytest.raises(StepError, match="saw no samples"):
        metrics.gather([])
    assert metrics.sum([]) == 0


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_means_of_what_has_a_weight_of_its_own(replicas: int) -> None:
    metrics, loader = make(replicas)

    def items() -> Any:
        for (x,) in loader:
            yield {"tokens": (x.double().mean(), x.sum()), "samples": x, "none": (math.nan, 0)}

    with pytest.raises(StepError, match="saw no samples of 'none'"):
        metrics.mean(items())
    tokens = metrics.mean((x.double().mean(), len(x) * 3) for (x,) in loader)
    assert tokens == pytest.approx(28.5)
    some = metrics.mean(
        (x.double().mean() if i % 2 else math.nan, i % 2) for i, (x,) in enumerate(loader)
    )
    assert not math.isnan(some)


@pytest.mark.parametrize("replicas", [1, 3])
def test_rows_of_numpy_are_those_of_torch(replicas: int) -> None:
    metrics, loader = make(replicas)
    assert metrics.sum(x.numpy() for (x,) in loader) == int(VALUES.sum())
    assert metrics.mean(x.numpy() / 1.0 for (x,) in loader) == pytest.approx(28.5)
    with pytest.raises(StepError, match=r"shape \(3,\) for a microbatch"):
        metrics.sum(np.zeros(3) for _ in loader)


def test_a_weight_goes_with_one_number() -> None:
    metrics, loader = make(1)
    with pytest.raises(StepError, match=r"shape \(4,\) with a weight"):
        metrics.mean((x, 4) for (x,) in loader)
    with pytest.raises(StepError, match=r"shape \(4,\) with a weight"):
        metrics.mean((x.numpy(), 4) for (x,) in loader)
    metrics, loader = make(1)
    with pytest.raises(StepError, match="a tuple of 3"):
        metrics.mean((x, 4, 5) for (x,) in loader)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_a_tensor_that_the_script_uses_again(replicas: int) -> None:
    metrics, loader = make(replicas)
    counts, rows = torch.zeros(100, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)

    def counted() -> Iterator[torch.Tensor]:
        for (x,) in loader:
            yield counts.zero_().index_add_(0, x, torch.ones_like(x))

    def copied() -> Iterator[torch.Tensor]:
        for (x,) in loader:
            rows[: len(x)] = x
            yield rows[: len(x)]

    assert torch.equal(metrics.sum(counted(), per_sample=False), VALUES.bincount(minlength=100))
    assert torch.equal(metrics.gather(copied()), VALUES)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("grad", [True, False], ids=["with stand-ins", "without"])
def test_sums_of_any_shape(replicas: int, grad: bool) -> None:
    metrics, loader = make(replicas)

    def table(x: torch.Tensor) -> torch.Tensor:
        return torch.bincount(x % 3, minlength=6).view(2, 3)

    with torch.set_grad_enabled(grad):
        found = metrics.sum((table(x) for (x,) in loader), per_sample=False)
        named = metrics.sum(
            ({"a": table(x).float(), "b": table(x).numpy(), "c": len(x)} for (x,) in loader),
            per_sample=False,
        )
    assert torch.equal(found, table(VALUES))
    assert found.dtype == torch.int64
    assert named["a"].dtype == torch.float64
    assert torch.equal(named["a"].long(), found)
    assert torch.equal(named["b"], found)
    assert named["c"] == 10
    found.zero_()
    with pytest.raises(StepError, match="values of the shapes"):
        metrics.sum((torch.zeros(1 + i) for i, _ in enumerate(loader)), per_sample=False)
