"""Where a run stands: rounds, keys, what acts when."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.engine.data.build import LoaderSettings, build
from lockstep.engine.data.loader import Loader
from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.layout.replicas import block
from lockstep.engine.training import listeners
from lockstep.engine.training.epochs import epochs_left
from lockstep.engine.training.loop import Loop
from lockstep.errors import StepError


class Listener(listeners.PointListener):
    def __init__(self) -> None:
        self.loops: list[tuple[Any, ...]] = []
        self.steps: list[int] = []
        self.points: list[int] = []

    def loop_begins(self, loop: LoopKey) -> None:
        self.loops.append(loop)

    def at_point(self) -> None:
        self.points.append(len(self.steps))

    def step_ends(self, step: int, microbatch: Any) -> None:
        self.steps.append(step)

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        self.loops.append((*loop, step, early))


def listened(seed: int, replicas: int, models: list[Any]) -> Loop:
    loop = Loop(seed, replicas, models)
    loop.listen([Listener()])
    return loop


def make(
    replicas=4, ranks=1, rank=0, *, length=10, number=0, seed=0, loop=None
) -> tuple[Loop, Loader]:
    loop = loop or listened(seed, replicas, [])
    settings = LoaderSettings(batch_size=max(4, replicas))
    source = build(
        TensorDataset(torch.arange(length)), settings, replicas, block(replicas, ranks, rank), seed
    )
    return loop, Loader(source, loop, number=number, batch_size=4, device=None)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_epochs_and_rounds() -> None:
    loop, first = make()
    _, second = make(number=1, loop=loop)
    ended = []
    for epoch in epochs_left(loop, 2, ended.append):
        assert (loop.epoch, loop.epochs) == (epoch, 2)
        for loader in (first, second, first):
            for _ in loader:
                pass
    begun = [entry for entry in loop._listeners[0].loops if len(entry) == 3]
    assert begun == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1)]
    assert ended == [0, 1]


def forward_draws(ranks: int, *, seed=0, wander=0) -> dict[tuple[int, ...], tuple[float, ...]]:
    found = {}
    for rank in range(ranks):
        loop, loader = make(4, ranks, rank, seed=seed)
        for _ in epochs_left(loop, 2, lambda _: None):
            for batch in loader.batches():
                for turn in range(2):
                    for _ in batch:
                        m = loop.microbatch
                        assert m.turn == turn
                        found[(*m.numbers, m.turn)] = draw()
                        for _ in range(wander * (rank + 1)):
                            draw()
    return found


def test_a_forward_pass_draws_the_same_on_every_layout() -> None:
    one = forward_draws(1)
    assert one == forward_draws(2, wander=1) == forward_draws(4) == forward_draws(3, wander=2)
    for column in zip(*one.values(), strict=True):
        assert len(set(column)) == len(one) == 2 * 3 * 4 * 2
    assert not set(one.values()) & set(forward_draws(1, seed=1).values())


@pytest.mark.parametrize("leave", [False, True])
def test_what_the_script_draws_after_a_loop_is_the_same_on_every_layout(leave: bool) -> None:
    def after(ranks: int, rank: int) -> list[tuple[float, ...]]:
        _, loader = make(4, ranks, rank)
        found = []
        for _ in range(2):
            for _ in loader:
                draw()
                if leave:
                    break
            found.append(draw())
        return found

    one = after(1, 0)
    assert all(after(ranks, rank) == one for ranks in (2, 3, 4) for rank in range(ranks))
    assert one[0] != one[1]


def test_what_the_script_draws_between_batches_is_the_same_on_every_layout() -> None:
    def between(ranks: int, rank: int) -> list[tuple[float, ...]]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        _, loader = make(4, ranks, rank)
        found = []
        for batch in loader.batches():
            for _ in batch:
                draw()
            found.append(draw())
        return found

    one = between(1, 0)
    assert len(set(one)) == 3
    assert all(between(ranks, rank) == one for ranks in (2, 3, 4) for rank in range(ranks))


def test_the_key_behind_a_batch_is_the_same_however_it_is_seen() -> None:
    """A metric whose items leave a loop open goes on from there."""
    loop, loader = make(1)
    assert loop.generators.key is None
    batches = iter(loader)
    next(batches), next(batches)
    other, whole = make(1)
    for batch in whole.batches():
        for _ in batch:
            pass
        assert other.generators.key == loop.generators.key is not None
        break
    assert other.generators.key != loop.generators.key, "the loop is over"


def test_what_evaluation_draws_between_batches_is_the_same_on_every_layout() -> None:
    with torch.no_grad():
        test_what_the_script_draws_between_batches_is_the_same_on_every_layout()


class Counting:
    """A model that meets its like after some steps, as the loop sees it."""

    is_split = False
    buffers = SimpleNamespace(are_trained=False, finish=lambda: None)

    def __init__(self, every: int) -> None:
        self.every, self.steps, self.met = every, 0, 0

    is_synchronized = property(lambda self: not self.steps)

    def step(self) -> None:
        self.steps = (self.steps + 1) % self.every

    def synchronize(self) -> None:
        self.met += bool(self.steps)
        self.steps = 0

    def nothing(self, *_: Any, **__: Any) -> None: ...

    show_newest = microbatch_begins = microbatch_ends = nothing


def count_points(every: tuple[int, ...], late: tuple[int, ...]) -> list[int]:
    """After which of 12 batches all models are whole, where some begin to step later than others."""
    models = [Counting(one) for one in every]
    _, loader = make(1, length=48, loop=(loop := listened(0, 1, models)))
    for number, _ in enumerate(loader):
        for model, first in zip(models, late, strict=True):
            if number >= first:
                loop.updated()
                model.step()
                loop.stepped(model)
    return loop._listeners[0].points


def test_where_one_model_meets_all_do() -> None:
    """Otherwise two that count their steps out of phase are never whole after the same batch."""
    assert count_points((4, 4), (0, 0)) == [4, 8, 12]
    assert count_points((4, 4), (0, 1)) == [4, 8, 12]
    assert count_points((4, 5), (0, 0)) == [4, 8, 12]
    assert count_points((3, 4), (2, 0)) == [4, 7, 10]
    assert count_points((4, 4), (0, 12)) == [4, 8, 12]
    assert count_points((1, 1), (0, 3)) == list(range(1, 13))


def test_a_barrier_is_no_matter_of_models() -> None:
    model = Counting(4)
    loop = Loop(0, 1, [model])
    model.step()
    loop.require_common_point("run.barrier", of_models=False)
    assert (model.steps, model.met) == (1, 0)
    loop.require_common_point("run.mean")
    assert (model.steps, model.met) == (0, 1)


def test_updates_act_on_the_last_microbatch_and_outside_of_loops() -> None:
    loop, loader = make()
    assert loop.acts_now()
    acts = [loop.acts_now() for _ in loader]
    assert acts == [False, False, False, True] * 3
    assert loop.acts_now()
    assert loop.microbatch is None


def test_a_step_is_counted_once_however_many_optimizers_update() -> None:
    loop, loader = make(length=8)
    for _ in loader:
        if loop.acts_now():
            loop.updated()
            loop.updated()
    assert loop.steps == 2
    assert loop._listeners[0].steps == [1, 2]


def test_an_update_after_a_batchs_microbatches_is_counted_with_it() -> None:
    loop, loader = make(length=8)
    counted = []
    for batch in loader.batches():
        for _ in batch:
            pass
        loop.updated()
        counted.append(loop.steps)
    assert loop.steps == 2
    assert loop._listeners[0].steps == [1, 2]


def test_a_loop_left_early_says_so() -> None:
    loop, loader = make()
    for _ in loader:
        if loop.microbatch.step == 1:
            break
    assert loop._listeners[0].loops == [(0, 0, 0), (0, 0, 0, 1, True)]
    assert loop.microbatch is None


def test_outside_of_a_loop_there_is_no_microbatch() -> None:
    loop, loader = make()
    with pytest.raises(StepError, match=r"run\.backward was called outside of a loop") as caught:
        loop.require_microbatch("run.backward")
    assert "run.loader" in caught.value.hint
    for _ in loader:
        assert loop.require_microbatch("x").step == 0
        break


def test_ranks_may_not_meet_inside_a_microbatch() -> None:
    loop, loader = make()
    loop.require_common_point("run.mean")
    for _ in loader:
        with pytest.raises(
            StepError, match=r"run\.mean was called inside a microbatch; with 4 replicas"
        ):
            loop.require_common_point("run.mean")
        with pytest.raises(StepError, match="iterating over a loader"):
            next(iter(loader))
        break
    loop, loader = make(1)
    for _ in loader:
        loop.require_common_point("run.mean")
