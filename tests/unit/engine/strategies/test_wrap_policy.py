"""Into which units a model is cut, and what cannot be sharded; on one rank, which is a group of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from lockstep.errors import ExactnessError, ModelError, StepError, UsageError
from tests.distributed.jobs import classes

pytestmark = pytest.mark.usefixtures("lone_group")
LARGE = 300  # squared, more than a unit needs


@pytest.fixture
def run(make_run: Callable[..., Any]) -> Any:
    with make_run(strategy="fsdp", replicas=2) as made:
        yield made


def units(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(LARGE, LARGE)
        self.small = nn.Linear(3, 3)
        self.stack = nn.Sequential(
            nn.Sequential(nn.Linear(LARGE, LARGE), nn.ReLU()), nn.Linear(3, 3), Inner()
        )
        self.inner = Inner()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(LARGE, LARGE), nn.Linear(LARGE, LARGE)])


def test_large_parts_and_children_of_containers_are_units(run: Any) -> None:
    made = run.model(Blocks())
    # The Inner in a container is a unit; the other one is looked into.
    expected = ["", "large", "stack.0.0", "stack.2", "inner.parts.0", "inner.parts.1"]
    assert units(made) == expected


def test_wrap_names_the_units(run: Any) -> None:
    assert units(run.model(Blocks(), wrap=[])) == [""]
    assert units(run.model(Blocks(), wrap=["small", nn.Sequential])) == [
        "",
        "small",
        "stack",
        "stack.0",
    ]


def test_parts_that_share_a_parameter_are_no_units_of_their_own(run: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Embedding(LARGE, LARGE)
            self.middle = nn.Linear(LARGE, LARGE)
            self.out = nn.Linear(LARGE, LARGE, bias=False)
            self.out.weight = self.into.weight

    assert units(run.model(Tied())) == ["", "middle"]
    with pytest.raises(ModelError, match="into and out share a parameter"):
        run.model(Tied(), wrap=["into", "out"])
    with pytest.raises(ModelError, match="out and the rest of the model share a parameter"):
        run.model(Tied(), wrap=["out"])


def test_a_part_with_two_names_is_one_unit(run: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(LARGE, LARGE)
            self.other = self.one

    assert units(run.model(Twice())) == ["", "one"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap": True}, "run.model was given bucket_cap"),
        ({"ignored_params": set()}, "given ignored_params.*their gradients would not meet"),
        ({"mesh": None}, "given mesh.*over the run's own mesh"),
        ({"gather": "never"}, "gather='never'; expected 'unit' or 'batch'"),
        ({"wrap": "0"}, "wrap is a str; expected a list"),
        ({"wrap": ["7"]}, "wrap names '7', which Sequential does not have"),
        ({"wrap": [nn.Conv2d]}, "wrap names .*Conv2d.*, which Sequential does not have"),
        ({"reshard_after_forward": 7}, "fully_shard does not take Sequential"),
        ({"mp_policy": "bf16"}, "mp_policy is a str; expected a MixedPrecisionPolicy"),
        ({"shard_placement_fn": lambda _: "x"}, "fully_shard does not take Sequential"),
    ],
)
def test_settings_that_make_no_sense(run: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run.model(nn.Sequential(nn.Linear(3, 3)), **settings)


def test_models_that_cannot_be_sharded(run: Any) -> None:
    flat = nn.Linear(3, 3)
    flat.scale = nn.Parameter(torch.ones(()))
    pairs = nn.Linear(3, 3, dtype=torch.complex64)
    turned = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    for module, message in [
        (flat, "the parameter scale has no dimension to be cut along"),
        (turned, "the parameter weight is not contiguous"),
        (pairs, "the parameter weight is complex"),
        (mixed, r"types torch\.float32, torch\.float64; expected one type in each unit"),
        (nn.Embedding(3, 3, sparse=True), "sparse=True; expected dense gradients"),
    ]:
        with pytest.raises(ModelError, match=message):
            run.model(module)
    run.model(mixed, wrap=["1"])


def test_models_that_share_parts(run: Any) -> None:
    part = nn.Linear(3, 3)
    model = run.model(nn.Sequential(part), wrap=["0"])
    with pytest.raises(ModelError, match="belongs to the run already"):
        run.model(model)
    with pytest.raises(ModelError, match="0 is sharded already; expected a model that shares no"):
        run.model(nn.Sequential(part))
    tied = nn.Linear(3, 3)
    tied.weight = part.weight
    with pytest.raises(ModelError, match="the parameter weight is a DTensor already"):
        run.model(tied)


def test_optimizers_that_look_across_elements(run: Any) -> None:
    model = run.model(nn.Linear(4, 4))
    for optimizer, message in [
        (torch.optim.Adafactor(model.parameters()), "Adafactor computes on whole parameters"),
        (
            torch.optim.AdamW(model.parameters(), fused=True),
            "AdamW is fused, which rounds by place",
        ),
    ]:
        with pytest.raises(ExactnessError, match=message):
            run.optimizer(optimizer)


def test_optimizers_that_look_across_elements_where_that_is_allowed(
    make_run: Callable[..., Any],
) -> None:
    with make_run(strategy="fsdp", exact=False) as run:
        model = run.model(nn.Linear(4, 4))
        fused = torch.optim.AdamW(model.parameters(), fused=True)
        assert run.optimizer(fused) is fused
        short = run.model(nn.Linear(4, 4).bfloat16())
        plain = torch.optim.SGD(short.parameters(), lr=0.1)
        assert run.optimizer(plain) is plain


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_updates_of_16_bit_parameters_on_the_cpu(run: Any, kind: torch.dtype) -> None:
    """What is left of a shard after whole vectors is rounded otherwise; frozen ones are not updated."""
    model = run.model(nn.Linear(4, 4).to(kind))
    with pytest.raises(
        ExactnessError, match=f"SGD updates parameters of {kind} on the CPU"
    ) as error:
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "fp32 parameters with precision='bf16'" in (error.value.hint or "")
    frozen = nn.Linear(4, 4).to(kind).requires_grad_(False)
    partly = run.model(nn.Sequential(frozen, nn.Linear(4, 4)), wrap=["0", "1"])
    run.optimizer(torch.optim.SGD(partly[1].parameters(), lr=0.1))
    other = run.model(nn.Sequential(nn.Linear(4, 4).to(kind), nn.Linear(4, 4)), wrap=["0", "1"])
    run.optimizer(torch.optim.SGD(other[1].parameters(), lr=0.1))  # which updates fp32 alone


def test_other_exchanges(make_run: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="exchange=native with strategy=fsdp"):
        make_run(strategy="fsdp", exchange="native")


def test_gradients_without_the_run(make_run: Callable[..., Any]) -> None:
    """On one replica, too, where plain PyTorch would do."""
    with make_run(strategy="fsdp", replicas=1) as run:
        model = run.model(nn.Linear(4, 4))
        with pytest.raises(StepError, match=r"got gradients outside of run\.backward"):
            model(torch.ones(2, 4)).sum().backward()


def train(run: Any, **settings: Any) -> dict[str, torch.Tensor]:
    model = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), **settings)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in run.loader(classes(24, (6,)), batch_size=8):
        run.backward(F.cross_entropy(model(x).float(), y))
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict(keep_vars=True).items()
    }
    return {name: value.detach() for name, value in state.items()}


def test_what_fully_shard_takes_is_passed_on(make_run: Callable[..., Any]) -> None:
    """Forward passes in bf16, sums in fp32; parts along another dimension."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for replicas, settings in [(1, {}), (4, {}), (4, {"mp_policy": policy})]:
        with make_run(strategy="fsdp", replicas=replicas) as run:
            found.append(train(run, **settings))
    whole, several, reduced = found
    for name, value in whole.items():
        assert value.dtype == reduced[name].dtype == torch.float32
        assert torch.allclose(value, several[name], atol=1e-5)
        assert not torch.equal(value, reduced[name])
        assert torch.allclose(value, reduced[name], atol=0.02)
    with make_run(strategy="fsdp", replicas=4) as run:
        other = train(run, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    assert all(torch.equal(several[name], other[name]) for name in several)


def test_gradients_that_wait_are_part_of_the_state(make_run: Callable[..., Any]) -> None:
    with make_run(strategy="fsdp", replicas=1) as run:
        model = run.model(nn.Linear(6, 4))
        for x, y in run.loader(classes(16, (6,)), batch_size=8):
            run.backward(F.cross_entropy(model(x), y))
        held = run._session.state.models[0]
        waiting = held.gradients()
        assert isinstance(waiting["weight"], DTensor), "each rank's own part"
        before = waiting["weight"].full_tensor()
        assert before.count_nonzero()
        model.zero_grad()
        assert held.gradients() == {}
        held.load_gradients(waiting)
        assert isinstance(model.weight.grad, DTensor)
        assert torch.equal(model.weight.grad.full_tensor(), before)


def test_after_the_run(make_run: Callable[..., Any]) -> None:
    with make_run(strategy="fsdp") as run:
        run.model(nn.Linear(6, 4))
        inside = run.digest()
    assert run.digest() == inside
    with pytest.raises(StepError, match="cut over ranks, and they have left the run"):
        run.export("weights.pt")


ELEMENT_BY_ELEMENT: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01),
    lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    torch.optim.Rprop,
    torch.optim.ASGD,
]


@pytest.mark.parametrize("make", ELEMENT_BY_ELEMENT)
def test_updates_have_the_same_bits_on_a_part(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    """What exactness rests on: a kernel gives an element the same bits wherever it lies in memory."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(9, 1003, generator=generator)

    def updated(lo: int, hi: int) -> torch.Tensor:
        parameter = nn.Parameter(start[lo:hi].clone())
        optimizer = make([parameter])
        for gradient in gradients:
            parameter.grad = gradient[lo:hi].clone()
            optimizer.step()
        return parameter.detach()

    whole = updated(0, 1003)
    for lo, hi in [(0, 1), (0, 3), (0, 7), (5, 13), (1, 500), (502, 1003), (1000, 1003)]:
        assert torch.equal(whole[lo:hi], updated(lo, hi)), (lo, hi)
