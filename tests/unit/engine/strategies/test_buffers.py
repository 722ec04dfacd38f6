"""Buffers: every replica starts from the same ones, and replica 0's updates are the run's."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.engine.strategies.buffers import Buffers, by_device


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def update(self, amount: float) -> tuple[float, int]:
        seen = self.value[0].item(), int(self.count)
        self.value += amount
        self.count += 1
        return seen


def step(module: Counter, buffers: Buffers, amounts: list[float]) -> list[tuple[float, int]]:
    """Let each replica add its amount; return what each of them started from."""
    seen = []
    for amount in amounts:
        buffers.before_forward()
        seen.append(module.update(amount))
        if len(seen) < len(amounts):
            buffers.next_replica()
    buffers.finish()
    return seen


def state(module: Counter) -> tuple[list[float], int]:
    return module.value.tolist(), int(module.count)


def test_replica_zero_is_the_runs() -> None:
    module = Counter()
    buffers = Buffers(module, range(3), group=None)
    assert step(module, buffers, [1.0, 10.0, 100.0]) == [(0.0, 0)] * 3
    assert state(module) == ([1.0, 1.0], 1)
    assert step(module, buffers, [2.0, 20.0, 200.0]) == [(1.0, 1)] * 3
    assert state(module) == ([3.0, 3.0], 2)


def test_several_forward_passes_of_one_replica_count() -> None:
    module = Counter()
    buffers = Buffers(module, range(2), group=None)
    for replica in range(2):
        for _ in range(3):
            buffers.before_forward()
            module.update(1.0)
        if replica == 0:
            buffers.next_replica()
    buffers.finish()
    assert state(module) == ([3.0, 3.0], 3)


def test_a_single_replica_is_left_alone() -> None:
    module = Counter()
    buffers = Buffers(module, range(1), group=None)
    step(module, buffers, [5.0])
    step(module, buffers, [6.0])
    assert state(module) == ([11.0, 11.0], 2)


def test_without_a_forward_pass_nothing_happens() -> None:
    module = Counter()
    buffers = Buffers(module, range(2), group=None)
    module.update(1.0)  # by hand, outside of any pass
    buffers.next_replica()
    buffers.finish()
    assert state(module) == ([1.0, 1.0], 1)
    assert not buffers.dirty


def test_a_replica_that_ran_no_forward_pass() -> None:
    module = Counter()
    buffers = Buffers(module, range(2), group=None)
    buffers.before_forward()
    module.update(1.0)
    buffers.next_replica()
    buffers.finish()
    assert state(module) == ([1.0, 1.0], 1)


def test_a_buffer_that_the_module_replaces() -> None:
    module = Counter()
    buffers = Buffers(module, range(2), group=None)
    for replica in range(2):
        buffers.before_forward()
        module.value = module.value + 1 + replica
        if replica == 0:
            buffers.next_replica()
    buffers.finish()
    assert module.value.tolist() == [1.0, 1.0]


def test_over_a_group(lone_group) -> None:
    module = Counter()
    buffers = Buffers(module, range(2), lone_group)
    step(module, buffers, [1.0, 10.0])
    assert state(module) == ([1.0, 1.0], 1)


def test_tensors_of_one_device_go_together() -> None:
    """A module that spans devices; none but the processor is needed here."""
    here, there = ([torch.zeros(k, device=device) for k in (1, 2)] for device in ("cpu", "meta"))
    for tensors, expected in [
        ([], []),
        (here, [here]),
        ([there[0], here[0], here[1], there[1]], [there, here]),
    ]:
        groups = by_device(tensors)
        assert [[id(one) for one in group] for group in groups] == [
            [id(one) for one in group] for group in expected
        ]
