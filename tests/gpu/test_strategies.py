"""Strategies on GPUs; elsewhere these tests are skipped, and say so (A1, A2, A5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel

from lockstep.engine.strategies.buffers import broadcast
from lockstep.testing import RankError, run_ranks
from tests.distributed import jobs, test_sync_batchnorm
from tests.distributed.jobs import classes, conv_net, fit, quiet_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
SEVERAL = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="this machine has fewer than 2 GPUs"
)


def train_dp(settings: dict[str, Any], keywords: dict[str, Any]) -> tuple[str, str, list[int]]:
    with quiet_run(strategy="dp", replicas=2, **settings) as run:
        model = run.model(conv_net(), **keywords)
        assert isinstance(model, DataParallel)
        assert list(model.state_dict()) == list(conv_net().state_dict())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        fit(run, model, run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True), optimizer)
        return run.digest(), run.exactness, list(model.device_ids)


def test_dataparallel_on_one_gpu_is_the_module() -> None:
    ((digest, exactness, ids),) = run_ranks(train_dp, 1, {}, {"device_ids": [0]})
    assert (exactness, ids) == ("exact", [0])
    assert run_ranks(jobs.train_conv, 1, {"replicas": 2}, {}) == [digest]


@SEVERAL
def test_dataparallel_takes_all_gpus() -> None:
    ((_, exactness, ids),) = run_ranks(train_dp, 1, {"exact": False}, {})
    assert (exactness, ids) == ("close", list(range(torch.cuda.device_count())))


@SEVERAL
def test_dataparallel_on_several_gpus_needs_a_word() -> None:
    with pytest.raises(RankError, match="ExactnessError: strategy=dp on GPUs 0, 1"):
        run_ranks(train_dp, 1, {}, {})


@SEVERAL
def test_batchnorm_over_gpus() -> None:
    found = test_sync_batchnorm.shares(2, 2, {}, exchange="native")
    expected = test_sync_batchnorm.alone(2, {})
    for a, b in zip(found["buffers"], expected["buffers"], strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


def test_buffers_on_the_processor_and_on_a_gpu() -> None:
    assert run_ranks(broadcast_both, 1) == [[1.0, 2.0, 3.0]]


def broadcast_both() -> list[float]:
    """As for a module that spans devices; a group of one rank copies nothing, but is asked for each."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    places = ["cuda", "cpu", "cuda"]
    tensors = [torch.tensor(k + 1.0, device=place) for k, place in enumerate(places)]
    broadcast(tensors, dist.group.WORLD)
    dist.destroy_process_group()
    return [tensor.item() for tensor in tensors]
