"""What one GPU is enough for: each way of sums, one rank over NCCL, two ranks of one device over Gloo.

Elsewhere these tests are skipped, and say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lockstep.engine.training import context
from lockstep.testing import run_ranks
from lockstep.world import accelerator, connect
from tests.adversary.verifying import ROOT
from tests.conftest import Lockstep
from tests.distributed import jobs, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

GPU = "cuda:0"


def chosen(device: str) -> torch.device:
    """Make a device the current one, as a rank does."""
    return torch.device("cpu") if device == "cpu" else accelerator.use(torch.device(device).index)


@contextmanager
def group_of(backend: str, device: str) -> Iterator[None]:
    """A process group of the script's own, whose ranks may share one device."""
    dist.init_process_group(backend, init_method="env://")
    with (
        patch.object(context, "choose_device", side_effect=lambda *_: chosen(device)),
        patch.object(connect, "device_identity", return_value=None),
    ):
        yield
    dist.destroy_process_group()


def within(backend: str, device: str, job: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run a job of the distributed tests in such a group; it must have used the device."""
    with group_of(backend, device):
        result = job(*given, **named)
    if device == GPU:
        assert torch.cuda.max_memory_allocated() > 0
    return result


def whole(backend: str, device: str, settings: dict[str, Any]) -> str:
    found: str = within(backend, device, jobs.train_conv, {"replicas": 4, **settings}, {})
    return found


def staged(backend: str, device: str, settings: dict[str, Any]) -> str:
    digest, _ = within(backend, device, spread.train, "list", replicas=2, **settings)
    return str(digest)


WAYS: list[tuple[Callable[..., str], dict[str, Any]]] = [
    (whole, {"strategy": "ddp", "exchange": "tree"}),
    (whole, {"strategy": "fsdp"}),
    (staged, {"strategy": "pipeline"}),
    (whole, {"strategy": "ddp", "exchange": "tree", "precision": "fp16"}),
    (whole, {"strategy": "ddp", "exchange": "tree", "precision": "bf16"}),
]
IDS = ["tree", "sharded", "pipeline", "ddp-fp16", "ddp-bf16"]


def alone(job: Callable[..., str], settings: dict[str, Any], device: str = GPU) -> list[str]:
    """Return what a single rank computes whose model is whole."""
    plain = {"strategy": "single", "precision": settings.get("precision", "fp32")}
    return run_ranks(job, 1, "gloo", device, plain)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
@pytest.mark.parametrize(("job", "settings"), WAYS, ids=IDS)
def test_one_rank_over_nccl(
    job: Callable[..., str], settings: dict[str, Any], backend: str
) -> None:
    assert run_ranks(job, 1, backend, GPU, settings) == alone(job, settings)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("job", "settings"), WAYS, ids=IDS)
def test_two_ranks_of_one_gpu_over_gloo(job: Callable[..., str], settings: dict[str, Any]) -> None:
    assert run_ranks(job, 2, "gloo", GPU, settings) == alone(job, settings) * 2


def test_verify_on_a_gpu(lockstep: Lockstep) -> None:
    script = str(ROOT / "tests/adversary/scripts/cnn_onecycle.py")
    words = ("--devices", "gpu", "--json", "--layouts", "1", "1,kill@9", "1,term@12")
    done = lockstep("verify", script, *words, timeout=300)
    assert done.code == 0, done.out + done.err
    assert [one["generations"] for one in json.loads(done.out)["layouts"]] == [1, 2, 2]
