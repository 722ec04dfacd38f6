"""fp16 and exchanges of the approximate class on CUDA devices; elsewhere skipped, and said so (A17)."""

from __future__ import annotations

import pytest
import torch

from lockstep.testing import run_ranks
from tests.distributed import low_precision as jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="this machine has fewer than 2 GPUs"
)


def test_an_overflow_on_one_replica() -> None:
    (told, *_), *_ = run_ranks(jobs.overflow, 1, {})
    assert [step[1] for step in told] == [65536.0] * 3 + [32768.0] * 3
    assert told[3][0] == told[2][0]


@two_devices
def test_an_overflow_on_one_of_two_devices() -> None:
    alone = run_ranks(jobs.overflow, 1, {})
    assert run_ranks(jobs.overflow, 2, {}) == alone * 2


@two_devices
@pytest.mark.parametrize(
    "asked",
    [
        *({"exchange": name} for name in ("bf16", "fp16", "powersgd")),
        *({"strategy": name} for name in ("local-sgd", "diloco")),
    ],
    ids=str,
)
def test_ranks_end_alike(asked: dict[str, str]) -> None:
    first, second = run_ranks(jobs.train_local, 2, {**asked, "replicas": 2})
    assert first == second
