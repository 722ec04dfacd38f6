"""Every keyword of DistributedDataParallel: what it does here, or that it is refused (A2).

The table names all of them: a keyword that a later torch brings fails the first test until it has a row.
Effects show on a group of one rank; what needs several is in tests/distributed/test_ddp_keywords.py.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.engine.exchange.native import NativeExchange
from lockstep.errors import ExactnessError, LockstepError, ModelError

KNOWN = [name for name in inspect.signature(DistributedDataParallel).parameters if name != "module"]


class Net(nn.Module):
    """A part that is never used, and batch statistics."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.never = nn.Linear(2, 2) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Seen:
    """What a training step shows of a keyword."""

    def __init__(self, model: Any, ddp: Any, buckets: int, storages: int, digest: str) -> None:
        self.model, self.ddp, self.digest = model, ddp, digest
        self.buckets, self.storages = buckets, storages


Train = Callable[..., Seen]


@pytest.fixture
def train(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train two steps; count the buckets of the last one, and the storages of its gradients."""
    counted: list[int] = []
    start = NativeExchange.start
    monkeypatch.setattr(
        NativeExchange,
        "start",
        lambda self, slots, **more: (counted.append(1), start(self, slots, **more))[1],
    )

    def go(
        settings: dict[str, Any], *, unused: bool = False, replicas: int = 1, **asked: Any
    ) -> Seen:
        with make_run(replicas=replicas, exchange="native", **asked) as run:
            model = run.model(Net(unused), **settings)
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            data = TensorDataset(torch.arange(64.0).view(16, 4).sin())
            for (x,) in run.loader(data, batch_size=8, shuffle=True):
                optimizer.zero_grad()
                counted.clear()
                run.backward(model(x).square().mean())
                optimizer.step()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            storages = len({g.untyped_storage().data_ptr() for g in grads})
            reducer = getattr(run._session.state.models[0], "_reducer", None)
            ddp = getattr(reducer, "_ddp", None)
            return Seen(model, ddp, len(counted), storages, run.digest())

    return go


def same(train: Train, value: Any, name: str) -> None:
    """The keyword reaches DDP, and changes no bit; what it changes besides cannot be seen here."""
    assert train({name: value}).digest == train({}).digest


def check_bucket_cap(train: Train) -> None:
    assert train({"bucket_cap_mb": 25}).buckets == 1
    assert train({"bucket_cap_mb": 1e-5}).buckets > 2


def check_bucket_caps(train: Train) -> None:
    # Bytes are given in whole MiB there: one of 1 MiB for all that is here.
    seen = train({"bucket_cap_mb_list": [1]})
    assert seen.ddp.bucket_bytes_cap_list == [1 << 20]
    assert seen.digest == train({}).digest


def check_find_unused(train: Train) -> None:
    for settings in ({}, {"find_unused_parameters": True}):
        assert train(settings, unused=True).model.never.weight.grad is None
    with pytest.raises(ModelError, match="not used in the loss, with find_unused_parameters=False"):
        train({"find_unused_parameters": False}, unused=True)


def check_views(train: Train) -> None:
    assert train({"gradient_as_bucket_view": True}).storages == 1  # all in one bucket
    assert train({}).storages == 6


def check_static(train: Train) -> None:
    seen = train({"static_graph": True})
    assert seen.ddp.static_graph is True
    assert seen.digest == train({}).digest
    # With several replicas on a rank DDP would take the first for the whole graph: it is not told.
    assert train({"static_graph": True}, replicas=2).ddp.static_graph is False


def check_reduction(train: Train) -> None:
    with pytest.warns(FutureWarning, match="`check_reduction` argument .* is deprecated"):
        train({"check_reduction": True})


def check_dim(train: Train) -> None:
    assert train({"dim": 1}).ddp.dim == 1


def check_init_sync(train: Train) -> None:
    same(train, value=False, name="init_sync")  # ranks that differ: tests/distributed


def check_batched(train: Train) -> None:
    seen = train({"batched_grad_copy": True})
    assert seen.ddp.batched_grad_copy is True
    assert seen.digest == train({}).digest


def check_lazy(train: Train) -> None:
    seen = train({"lazy_bucket_allocation": True})
    assert seen.ddp.lazy_bucket_allocation is True
    assert seen.digest == train({}).digest


def check_buffers(name: str) -> Callable[[Train], None]:
    def check(train: Train) -> None:
        with pytest.raises(ExactnessError, match=f"{name}=False would break the promise"):
            train({name: False})
        assert train({name: True}).digest == train({}).digest
        train({name: False}, exact=False)  # ranks that differ: tests/distributed

    return check


def refused(value: Any, match: str) -> Callable[[Train], None]:
    def check(train: Train) -> None:
        (name,) = [name for name, row in ROWS.items() if row is check]
        for exact in (True, False):
            with pytest.raises(ModelError, match=match) as caught:
                train({name: value}, exact=exact)
            assert caught.value.hint

    return check


ROWS: dict[str, Callable[[Train], None]] = {
    "device_ids": refused([0], r"device_ids=\[0\], and the run computes on the CPU"),
    "output_device": refused("cuda:0", "output_device='cuda:0', and the run computes on the CPU"),
    "dim": check_dim,
    "broadcast_buffers": check_buffers("broadcast_buffers"),
    "forward_sync_buffers": check_buffers("forward_sync_buffers"),
    "init_sync": check_init_sync,
    "process_group": refused(object(), "works in the groups that the run makes"),
    "device_mesh": refused(object(), "works in the groups that the run makes"),
    "bucket_cap_mb": check_bucket_cap,
    "bucket_cap_mb_list": check_bucket_caps,
    "find_unused_parameters": check_find_unused,
    "check_reduction": check_reduction,
    "gradient_as_bucket_view": check_views,
    "static_graph": check_static,
    "delay_all_reduce_named_params": refused([("weight", None)], "would average these gradients"),
    "param_to_hook_all_reduce": refused(
        nn.Parameter(torch.ones(2)), "would average these gradients"
    ),
    "mixed_precision": refused(object(), "takes the communication hook"),
    "skip_all_reduce_unused_params": refused(True, "each rank would decide by itself"),
    "batched_grad_copy": check_batched,
    "lazy_bucket_allocation": check_lazy,  # from torch 2.15 on
}


def test_a_model_keeps_its_class(train: Train, lone_group: Any) -> None:
    seen = train({})
    assert type(seen.model) is Net
    assert seen.ddp is not None


def test_a_compiled_model_is_cut_at_the_buckets(make_run: Any, lone_group: Any) -> None:
    """torch.compile asks for the DDP that is around a module while it is called, and for no longer."""
    seen = []

    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(DistributedDataParallel._get_active_ddp_module())
            return super().forward(x)

    with make_run(replicas=1, exchange="native") as run:
        net = Asks(4, 1)
        plain = run.model(nn.Sequential(net, nn.Flatten()))
        plain(torch.ones(2, 4))
        compiled = Asks(4, 1)
        compiled.compile(disable=True)
        model = run.model(compiled)
        model(torch.ones(2, 4))
        assert seen[0] is None
        assert isinstance(seen[1], DistributedDataParallel)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 5))
        assert DistributedDataParallel._get_active_ddp_module() is None


def test_the_table_has_every_keyword() -> None:
    assert set(KNOWN) <= set(ROWS)


@pytest.mark.parametrize("name", [name for name in ROWS if name in KNOWN])
def test_a_keyword_of_ddp(name: str, train: Train, lone_group: Any) -> None:
    ROWS[name](train)


@pytest.mark.parametrize("name", KNOWN)
def test_on_a_single_rank_it_is_taken_or_refused_alike(name: str, train: Train) -> None:
    """Where DDP is not used, keywords have no effect, but mistakes show."""
    passes: dict[str, Any] = {
        "dim": 1,
        "broadcast_buffers": True,
        "forward_sync_buffers": True,
        "init_sync": False,
        "bucket_cap_mb": 1,
        "bucket_cap_mb_list": [1],
        "find_unused_parameters": False,
        "check_reduction": True,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "batched_grad_copy": True,
        "lazy_bucket_allocation": True,
    }
    if name in passes:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            seen = train({name: passes[name]})
        assert type(seen.model) is Net
    else:
        with pytest.raises(LockstepError, match=name):
            train({name: [0]})


def test_one_that_ddp_does_not_have(train: Train, lone_group: Any) -> None:
    with pytest.raises(ModelError, match="DistributedDataParallel has no setting bucket_cap"):
        train({"bucket_cap": 1})


def test_one_that_ddp_does_not_have_on_a_single_rank(train: Train) -> None:
    with pytest.raises(ModelError, match="DistributedDataParallel has no setting bucket_cap"):
        train({"bucket_cap": 1})
