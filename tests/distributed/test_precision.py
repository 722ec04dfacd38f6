"""fp16 with a loss scale: its decisions are the run's, not a rank's (A17)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lockstep.testing import assert_same, run_ranks
from tests.distributed import low_precision as jobs

pytestmark = pytest.mark.ranks(4)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("replica", [0, 3])
def test_an_overflow_on_one_replica_skips_the_same_step_on_every_layout(replica: int) -> None:
    seen = [run_ranks(jobs.overflow, n, {}, 3, replica) for n in (1, 2, 4)]
    told, digest, last_epoch, exactness = seen[0][0]
    assert exactness == "exact"
    assert all(one == seen[0][0] for ranks in seen for one in ranks)
    digests = [step[0] for step in told]
    assert digests[3] == digests[2], "the step with the overflow changes nothing"
    assert len(set(digests)) == 5
    assert digests[-1] == digest
    assert [step[1] for step in told] == [65536.0] * 3 + [32768.0] * 3
    assert [step[3] for step in told] == [1, 2, 3, 4, 5, 6], "it counts as a step"
    assert last_epoch == 6
    norms = [float(step[2]) for step in told]
    assert [math.isfinite(norm) for norm in norms] == [True] * 3 + [False] + [True] * 2
    assert all(0 < norm < 5 for norm in norms if math.isfinite(norm)), "norms are unscaled"


def test_one_digest_on_1_to_4_ranks() -> None:
    assert_same(jobs.train_half, [1, 2, 3, 4], {}, replicas=4)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["tree", "shared-memory"])
def test_exchanges_of_the_exact_class_agree(exchange: str) -> None:
    alone = run_ranks(jobs.train_half, 1, {"replicas": 4})
    assert run_ranks(jobs.train_half, 2, {"replicas": 4, "exchange": exchange})[:1] == alone


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_strategies_of_the_exact_class_agree(strategy: str) -> None:
    alone = run_ranks(jobs.train_half, 1, {"replicas": 2})
    settings = {"replicas": 2, "strategy": strategy}
    assert run_ranks(jobs.train_half, 2, settings) == alone * 2


def test_ranks_that_hold_parts_agree_on_an_overflow() -> None:
    """The first rank alone has it, in its part of the gradients."""
    ranks = run_ranks(jobs.overflow, 2, {"strategy": "fsdp"})
    assert ranks[0] == ranks[1]
    told = ranks[0][0]
    digests = [step[0] for step in told]
    assert digests[3] == digests[2]
    assert len(set(digests)) == 5
    assert [step[1] for step in told] == [65536.0] * 3 + [32768.0] * 3


def test_the_scale_comes_back(tmp_path: Path) -> None:
    """Stopped after an overflow, and continued on a different number of ranks: as if nothing had been."""
    environ = {"LOCKSTEP_REPLICAS": "2", "LOCKSTEP_THREADS": "1"}
    whole = run_ranks(jobs.scaled_and_stopped, 1, str(tmp_path / "whole"), environ=environ)
    assert whole[0][1] == 32768.0
    stop = {**environ, "LOCKSTEP_FAULTS": "term@7"}
    first = run_ranks(jobs.scaled_and_stopped, 1, str(tmp_path / "run"), environ=stop)
    assert first == [("preempted", 32768.0)]
    second = run_ranks(jobs.scaled_and_stopped, 2, str(tmp_path / "run"), environ=environ)
    assert second == whole * 2
