"""Ranks that evaluate agree whether they end, each at its own speed or all batch by batch."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from lockstep.engine.recovery.evaluations import Agreement


def went(seed: int, ranks: int, batches: int, asked: list[int], *, together: bool) -> list[int]:
    """Return after which batch each rank ends: that behind the last where it does not.

    Args:
        seed: of the order in which ranks move.
        ranks: number of ranks.
        batches: of the loop.
        asked: for each rank the batch from which on it knows that the run is asked to end.
        together: whether a batch needs all ranks, as a forward pass of a model that is cut over them.
    """
    dice, store = random.Random(seed), dist.HashStore()
    own = [Agreement(store, rank, ranks) for rank in range(ranks)]
    for one in own:
        one.begins("1/0/0")
    done, begun, ended = [0] * ranks, [0] * ranks, [False] * ranks
    while not all(ended):
        rank = dice.choice([r for r in range(ranks) if not ended[r]])
        if begun[rank] == done[rank]:
            begun[rank] += 1
            continue
        if together and min(begun) < begun[rank]:
            assert not any(e and b < begun[rank] for e, b in zip(ended, begun, strict=True)), (
                "hangs"
            )
            continue
        done[rank] += 1
        if done[rank] >= asked[rank] and own[rank].after(done[rank]):
            ended[rank] = True
        elif done[rank] == batches:
            ended[rank] = True
            done[rank] += not own[rank].ends()
    return done


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_all_end_in_a_loop_or_none(seed: int, together: bool) -> None:
    dice = random.Random(seed)
    ranks, batches = dice.randrange(2, 5), dice.randrange(1, 9)
    asked = [dice.randrange(1, batches + 2) for _ in range(ranks)]
    done = went(seed, ranks, batches, asked, together=together)
    assert all(d <= batches for d in done) or all(d > batches for d in done), (done, asked)
    if together and max(done) <= batches:
        assert len(set(done)) == 1, "no rank waits for another one in a batch"


def test_they_end_soon_after_they_are_asked() -> None:
    assert max(went(1, 3, 100, [4, 5, 6], together=True)) <= 7


def test_a_rank_that_is_not_asked_in_the_loop_lets_all_go_on() -> None:
    assert went(1, 3, 20, [4, 5, 99], together=True) == [21] * 3
