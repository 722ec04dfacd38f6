"""DataParallel: its defaults, its fallback, and what is refused (A1).

No test here computes on a GPU. What a GPU would have to do is left to tests/gpu; the choice of devices
is a function of numbers, and DataParallel itself, without a GPU, is a wrapper around one call.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import TensorDataset

from lockstep.engine.strategies import dp
from lockstep.engine.training.parallel_dims import choose_mesh
from lockstep.errors import DeviceError, ExactnessError, ModelError, UsageError
from lockstep.settings import Settings
from lockstep.world import World
from tests.unit.contexts import model_context

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def train(run, **settings) -> tuple[str, nn.Module]:
    data = TensorDataset(torch.arange(120.0).view(30, 4).sin())
    with run:
        model = run.model(net(), **settings)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(data, batch_size=8, shuffle=True):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        run.export(run.directory / "weights.pt")
        return run.digest(), model


@pytest.mark.parametrize("replicas", [1, 3])
def test_without_a_gpu_it_is_the_bare_module_and_says_so(make_run, capsys, replicas: int) -> None:
    alone, _ = train(make_run(replicas=replicas))
    capsys.readouterr()
    run = make_run(replicas=replicas, strategy="dp", progress=False)
    digest, model = train(run, dim=0)
    lines = capsys.readouterr().err.splitlines()
    (told,) = [line for line in lines if "strategy=dp" in line]
    assert told.startswith("lockstep: strategy=dp without a GPU: Sequential runs as it is")
    assert digest == alone
    assert type(model) is nn.Sequential
    assert run.exactness == "exact"
    weights = torch.load(run.directory / "weights.pt", weights_only=True)
    assert list(weights) == list(net().state_dict())


def test_in_a_group_of_one_rank(make_run, lone_group, capsys) -> None:
    _, model = train(make_run(replicas=2, strategy="dp", progress=True))
    assert type(model) is nn.Sequential
    assert "without a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings", [{"device_ids": [0, 1]}, {"output_device": 0}, {"device_ids": []}]
)
def test_devices_without_a_gpu(make_run, settings: dict) -> None:
    (name,) = settings
    with pytest.raises(DeviceError, match=f"{name}=.*computes on the CPU; expected GPUs") as caught:
        train(make_run(strategy="dp"), **settings)
    assert caught.value.exit_code == 2
    assert f"leave {name} out" in caught.value.hint


def test_keywords_are_dataparallels(make_run) -> None:
    with pytest.raises(ModelError, match="DataParallel has no setting bucket_cap") as caught:
        train(make_run(strategy="dp"), bucket_cap=1)
    assert caught.value.hint == "its settings are device_ids, output_device, dim"


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(ModelError, match="sparse=True"):
        dp.check_settings(nn.Embedding(2, 2, sparse=True), {}, exact=False, device=CPU)


def test_several_ranks_are_refused() -> None:
    world = World(rank=0, size=2, local_rank=0, local_size=2, address="127.0.0.1", port=1)
    with pytest.raises(UsageError, match="strategy=dp with 2 ranks; expected one rank"):
        choose_mesh(Settings(name="x", strategy="dp"), world)


@pytest.mark.parametrize(
    ("asked", "own", "count", "chosen"),
    [
        (None, 0, 4, [0, 1, 2, 3]),  # PyTorch's default: all of them, gathered on the first
        (None, 2, 3, [2, 0, 1]),
        (None, 0, 1, [0]),
        ([0, 2], 0, 3, [0, 2]),
        ([torch.device("cuda", 1), "cuda:0"], 1, 2, [1, 0]),
    ],
)
def test_which_gpus(asked: list | None, own: int, count: int, chosen: list[int]) -> None:
    assert dp.choose_devices(asked, own, count) == chosen


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([0, 4], r"device_ids=\[0, 4\]; expected different ones of the 3 GPU"),
        ([0, 0], "expected different ones"),
        ([], "expected different ones"),
        (["cpu"], "expected different ones"),
        ([1, 0], r"begins with another GPU than cuda:0.*; expected 0 to be the first"),
    ],
)
def test_gpus_that_cannot_be(asked: list, message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        dp.choose_devices(asked, 0, 3)
    assert caught.value.hint


def test_several_gpus_need_a_word(monkeypatch: pytest.MonkeyPatch, cuda: None) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ExactnessError, match="strategy=dp on GPUs 0, 1, 2, 3") as caught:
        dp.check_settings(net(), {}, exact=True, device=GPU)
    assert "--no-exact" in caught.value.hint
    dp.check_settings(net(), {}, exact=False, device=GPU)
    dp.check_settings(net(), {"device_ids": [0]}, exact=True, device=GPU)


@NO_GPU
def test_the_wrapper_looks_like_the_module() -> None:
    module = net()
    model = dp.DataParallelModel(module, model_context(), {})
    wrapped = model.wrapped
    assert isinstance(wrapped, DataParallel)
    assert model.exactness == "exact"  # of no GPU, or one
    assert list(wrapped.state_dict()) == list(module.state_dict())
    assert [name for name, _ in wrapped.named_parameters()] == [
        n for n, _ in module.named_parameters()
    ]
    assert len(wrapped) == 4
    assert wrapped[0] is module[0]
    assert type(copy.deepcopy(wrapped)) is nn.Sequential
    wrapped.eval()
    x = torch.randn(3, 4)
    assert torch.equal(wrapped(x), module(x))


def test_the_module_stays_where_checkpoints_look(tmp_path: Path, make_run) -> None:
    run = make_run(strategy="dp")
    with run:
        model = run.model(net())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save(state, tmp_path / "weights.pt")
        for parameter in model.parameters():
            parameter.data.zero_()
        run.load(tmp_path / "weights.pt")
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
