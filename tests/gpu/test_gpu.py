"""What needs a CUDA device; elsewhere these tests are skipped, and say so."""

from __future__ import annotations

import pytest
import torch

from lockstep.testing import run_ranks
from tests.distributed import jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def test_two_runs_on_a_gpu_have_equal_bits() -> None:
    first, second = (run_ranks(jobs.train_conv, 1, {"replicas": 4}, {}) for _ in range(2))
    assert first == second


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than 2 GPUs")
@pytest.mark.parametrize("exchange", ["native", "tree"])
def test_one_and_two_gpus_have_equal_bits(exchange: str) -> None:
    one = run_ranks(jobs.train_conv, 1, {"replicas": 4}, {})
    two = run_ranks(jobs.train_conv, 2, {"replicas": 4, "exchange": exchange}, {})
    assert two == one * 2


def test_batches_arrive_on_the_device() -> None:
    assert run_ranks(jobs.devices_of_a_batch, 1) == [("cuda", "cuda")]


def test_bf16_on_a_gpu() -> None:
    first, second = (run_ranks(jobs.train_adamw, 1, "bf16") for _ in range(2))
    assert first == second
