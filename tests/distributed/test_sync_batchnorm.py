"""run.sync_batchnorm against BatchNorm in one process, on the whole global batch (A14)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.testing import RankError, run_ranks
from tests.distributed.jobs import quiet_run

pytestmark = pytest.mark.ranks(4)

Numbers = dict[str, list[list[float]]]


def net(dims: int, settings: dict[str, Any]) -> nn.Module:
    """Convolution, the layer to look at, and a linear layer; all in fp64, so that tolerances are small."""
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    layers = [conv(1, 4, 2), norm(4, **settings), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)]
    model = nn.Sequential(*layers)
    model(torch.zeros(2, 1, *[3] * dims))  # the last layer learns its size
    return model


def data(samples: int, dims: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 1, *[3] * dims, generator=generator).double() + 2
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def train(
    dims: int, settings: dict[str, Any], *, samples: int = 34, synced: bool, **run_settings: Any
) -> Numbers:
    """Train on batches of 16, the last of them with 2 samples; return all that can be compared."""
    found: Numbers = {"outputs": [], "gradients": [], "buffers": [], "evaluation": []}
    with quiet_run(audit="off", **run_settings) as run:
        module = net(dims, settings).double()
        model = run.model(run.sync_batchnorm(module) if synced else module)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
        loader = run.loader(data(samples, dims), batch_size=16, shuffle=True)
        for _ in run.epochs(2):
            for x, y in loader:
                output = model(x)
                run.backward(F.cross_entropy(output, y))
                found["gradients"].append(flat(p.grad for p in model.parameters()))
                found["outputs"].append(flat([output]))
                optimizer.step()
                optimizer.zero_grad()
            found["buffers"].append(flat(model.buffers()))
        model.eval()
        with torch.no_grad():
            if settings.get("track_running_stats", True):
                found["evaluation"] = [flat([run.gather(model(x) for x, _ in loader)])]
    return found


def flat(tensors: Any) -> list[float]:
    return torch.cat(
        [t.detach().double().reshape(-1) for t in tensors] or [torch.zeros(0)]
    ).tolist()


def shares(ranks: int, *args: Any, **settings: Any) -> Numbers:
    """Train on several ranks; the outputs of a batch are those of all of them, in order."""
    each = run_ranks(train_from, ranks, args, {**settings, "synced": True})
    for one in each[1:]:
        assert one["gradients"] == each[0]["gradients"]
        assert one["buffers"] == each[0]["buffers"]
    batches = zip(*(one["outputs"] for one in each), strict=True)
    outputs = [list(itertools.chain(*parts)) for parts in batches]
    return {**each[0], "outputs": outputs}


def train_from(args: tuple[Any, ...], settings: dict[str, Any]) -> Numbers:
    return train(*args, **settings)


def alone(*args: Any, **settings: Any) -> Numbers:
    (found,) = run_ranks(train_from, 1, args, {**settings, "synced": False, "replicas": 1})
    return found


def close(found: Numbers, expected: Numbers) -> None:
    for name, lists in expected.items():
        assert len(found[name]) == len(lists)
        for a, b in zip(found[name], lists, strict=True):
            # A replica without a sample has shown the output of one that does not count, at the end.
            assert len(a) >= len(b)
            torch.testing.assert_close(
                torch.tensor(a[: len(b)]), torch.tensor(b), rtol=1e-9, atol=1e-11
            )


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_equal_to_the_whole_batch_in_one_process(dims: int, ranks: int) -> None:
    """With 3 ranks shares are 6, 5 and 5; of the last batch 1, 1 and none, which a stand-in takes."""
    close(shares(ranks, dims, {}), alone(dims, {}))


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": 0.5, "eps": 0.1},
    ],
    ids=str,
)
def test_every_setting_of_the_layer(settings: dict[str, Any]) -> None:
    close(shares(3, 2, settings), alone(2, settings))


def test_four_ranks_and_the_other_exchanges() -> None:
    expected = alone(2, {})
    close(shares(4, 2, {}, exchange="tree"), expected)
    close(shares(4, 2, {}, exchange="native", exact=False), expected)


def test_fp32() -> None:
    """In the type that models have, within what its rounding allows."""
    one = run_ranks(train_fp32, 1, False)[0]
    two = run_ranks(train_fp32, 3, True)[0]
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-4, atol=1e-5)


def train_fp32(synced: bool) -> list[float]:
    with quiet_run() as run:
        module = net(2, {})
        model = run.model(run.sync_batchnorm(module) if synced else module)
        assert run.exactness == ("close" if synced else "exact")
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(data(34, 2), batch_size=16):
            run.backward(F.cross_entropy(model(x.float()), y))
            optimizer.step()
            optimizer.zero_grad()
        return flat([*model.parameters(), *model.buffers()])


def test_one_sample_in_all_is_refused_on_every_rank() -> None:
    with pytest.raises(RankError, match="ValueError: Expected more than 1 value per channel"):
        run_ranks(one_sample, 2)


def one_sample() -> None:
    with quiet_run() as run:
        model = run.model(run.sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        for (x,) in run.loader(TensorDataset(torch.ones(1, 2)), batch_size=4):
            model(x)


def test_forward_passes_without_gradients_count_all_replicas() -> None:
    """Statistics that are collected without training; the last batch leaves a replica without a sample."""
    for ranks in (1, 3):
        assert run_ranks(recalibrate, ranks) == [[8.0, 8.0, 7.5]] * ranks


def recalibrate() -> list[float]:
    seen = []
    with quiet_run() as run:
        norm = nn.BatchNorm1d(1, momentum=1.0, affine=False)
        model = run.model(
            run.sync_batchnorm(nn.ModuleDict({"norm": norm, "other": nn.Linear(1, 1)}))
        )
        x = torch.tensor([6.0, 8, 10, 8, 6, 10, 7, 8]).view(8, 1)
        with torch.no_grad():
            for batch in run.batches(run.loader(TensorDataset(x), batch_size=3)):
                for (part,) in batch:
                    model.norm(part)
                seen.append(model.norm.running_mean.item())
    return seen


def test_replicas_that_divide_and_that_do_not() -> None:
    (a,), (b,) = (run_ranks(first_loss, 2, 4)[:1], run_ranks(first_loss, 2, 4)[:1])
    assert a == b == "approximate"
    with pytest.raises(
        RankError, match=r"ModelError: .*3 replicas on 2 rank\(s\).*different numbers"
    ):
        run_ranks(first_loss, 2, 3)


def first_loss(replicas: int) -> str:
    with quiet_run(replicas=replicas, exact=False) as run:
        model = run.model(run.sync_batchnorm(net(2, {}).double()))
        for x, y in run.loader(data(16, 2), batch_size=8):
            run.backward(F.cross_entropy(model(x), y))
            model.zero_grad()
        return run.exactness


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_a_model_of_several_uses_of_a_layer(ranks: int) -> None:
    """A layer that is called twice meets twice, forward and backward."""
    expected = run_ranks(twice, 1)[0]
    torch.testing.assert_close(torch.tensor(run_ranks(twice, ranks)[0]), torch.tensor(expected))


def twice() -> list[float]:
    with quiet_run() as run:
        norm = nn.BatchNorm1d(3)
        model = run.model(
            run.sync_batchnorm(nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3), norm))
        )
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 3, generator=generator)
        for (part,) in run.loader(TensorDataset(x), batch_size=8):
            run.backward((model(part) - 1).pow(4).mean())
            optimizer.step()
            optimizer.zero_grad()
        return flat([*model.parameters(), *model.buffers()])


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("synced", [True, False])
def test_a_rank_that_leaves_after_the_first_batch_is_named(synced: bool) -> None:
    """The other waits for its statistics; or, without, in the first place where DDP could wait."""
    with pytest.raises(RankError, match=r"EarlyExitError|MismatchError|died with exit code 1"):
        run_ranks(leave, 2, synced, timeout=30)


def leave(synced: bool) -> None:
    with quiet_run() as run:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = run.model(run.sync_batchnorm(module) if synced else module)
        data = TensorDataset(torch.arange(32.0).view(16, 2))
        for (x,) in run.loader(data, batch_size=4):
            if run.world.rank == 1 and x[0, 0] > 8:
                break
            run.backward(model(x).square().mean())
            model.zero_grad()


def test_gradients_of_gradients_are_refused() -> None:
    with pytest.raises(RankError, match=r"StepError: a gradient was taken with create_graph=True"):
        run_ranks(penalised, 2)


def penalised() -> None:
    with quiet_run() as run:
        norm = run.sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        model = run.model(norm)
        for (x,) in run.loader(TensorDataset(torch.arange(32.0).view(16, 2)), batch_size=4):
            torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
