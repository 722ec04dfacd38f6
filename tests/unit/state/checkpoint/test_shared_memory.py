"""Memory that outlives the workers: what a kill between any two writes leaves behind."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator

import pytest
import torch

from lockstep.state.checkpoint.shared_memory import (
    VARIABLE,
    Buffer,
    Descriptors,
    LossRing,
    StatusPage,
    progress,
    run_of,
    tag_of,
)
from lockstep.state.checkpoint.snapshot import Snapshots
from lockstep.state.checkpoint.snapshot_schedule import SnapshotSchedule

TAG = bytes(range(32))


@pytest.fixture
def memory() -> Iterator[Descriptors]:
    descriptors = Descriptors.create()
    yield descriptors
    descriptors.close()


def state(value: float, numel: int = 5) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((2, 3), value),
        "b": torch.full((numel,), value, dtype=torch.float64),
        "n": torch.tensor(int(value)),
        "none": torch.empty(0),
    }


def ranks(memory: Descriptors, count: int, tag: bytes = TAG) -> list[Snapshots]:
    return [Snapshots(memory, tag=tag, part=part, parts=count) for part in range(count)]


def write(team: list[Snapshots], number: int, tensors: dict[str, torch.Tensor]) -> None:
    for rank in team:
        rank.write(number, f"text {number}", tensors)


def found(memory: Descriptors, tag: bytes = TAG) -> float | None:
    """Return the value of the newest snapshot, having looked at every element of it."""
    snapshot = Snapshots(memory, tag=tag, part=0, parts=1).found
    if snapshot is None:
        return None
    values = {v for tensor in snapshot.tensors.values() for v in tensor.flatten().tolist()}
    (value,) = values
    assert snapshot.text.startswith("text ")
    return float(value)


def test_nobody_else_can_open_it(memory):
    assert Descriptors.find({}) is None
    assert Descriptors.find({VARIABLE: "0,1,2"}) is None
    assert Descriptors.find({VARIABLE: "x"}) is None
    assert Descriptors.find({VARIABLE: "400,401,402"}) is None
    assert Descriptors.find({VARIABLE: memory.variable()}) == memory
    assert not any(os.get_inheritable(descriptor) for descriptor in memory.all)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("numel", [5, 70_000])
def test_the_newest_whole_snapshot_is_found(memory, count, numel):
    assert found(memory) is None
    assert progress(memory) == (b"", 0)
    team = ranks(memory, count)
    for number in range(team[0].number, team[0].number + 5):
        write(team, number, state(number, numel))
        assert found(memory) == number
        assert progress(memory) == (TAG, number)
    assert found(memory, tag=bytes(32)) is None, "of another run"


def test_a_run_sees_that_the_memory_is_of_one_that_comes_later(memory):
    tags = [tag_of(b"the same script", run) for run in range(3)]
    assert [run_of(tag) for tag in tags] == [0, 1, 2]
    assert len({tag[4:] for tag in (*tags, tag_of(b"another", 0))}) == 2
    write(ranks(memory, 2, tags[1]), 1, state(1))
    for tag, later in zip(tags, (True, False, False), strict=True):
        (team,) = ranks(memory, 1, tag)
        assert team.is_of_later_run is later
        assert (team.found is not None) is (tag == tags[1])


def test_a_snapshot_of_another_layout_of_ranks_is_read(memory):
    write(ranks(memory, 3), 1, state(1, 70_000))
    team = ranks(memory, 2)
    assert team[0].number == 2
    write(team, 2, state(2, 70_000))
    assert found(memory) == 2


@pytest.mark.parametrize("dies", range(12))
def test_a_kill_between_any_two_writes(memory, monkeypatch, dies):
    """Ranks take turns in copying, and die after so many calls: the snapshot before stays whole."""
    team = ranks(memory, 2)
    write(team, 1, state(1, 70_000))
    calls = itertools.count()

    class Killed(BaseException):
        pass

    def dying(function):
        def call(*args):
            if next(calls) == dies:
                raise Killed
            return function(*args)

        return call

    for name in ("begin", "describe", "commit", "reserve"):
        monkeypatch.setattr(Buffer, name, dying(getattr(Buffer, name)))
    monkeypatch.setattr(Snapshots, "_copy", dying(Snapshots._copy))
    committed = 1
    try:
        for number in (2, 3):
            write(team, number, state(number, 70_000))
            committed = number
    except Killed:
        pass
    monkeypatch.undo()
    assert found(memory) == committed
    # The next generation: its first snapshot does not go where that one is.
    team = ranks(memory, 2)
    number = team[0].number
    assert number > committed
    team[1].write(number, f"text {number}", state(number, 70_000))
    assert found(memory) == committed
    team[0].write(number, f"text {number}", state(number, 70_000))
    assert found(memory) == number


def test_the_only_whole_buffer_is_not_written_over(memory):
    team = ranks(memory, 2)
    write(team, 1, state(1))
    team[0].write(2, "text 2", state(2))  # the other rank never does
    write(team, 3, state(3))
    assert found(memory) == 1
    write(team, 4, state(4))
    assert found(memory) == 4


def test_a_state_may_grow(memory):
    team = ranks(memory, 2)
    for number, numel in enumerate([5, 70_000, 300_000, 10], 1):
        write(team, number, state(number, numel))
        assert found(memory) == number


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("length", [1 << 12, 1 << 16, 1 << 20])
def test_each_rank_has_a_text_of_another_length(memory, order, length):
    """Just below and just above any size at which the memory may be laid out in a different way."""
    head = 500  # the most that stands beside the text
    for number, shorter in enumerate(range(length - head, length + 10, 51), 1):
        team, tensors = ranks(memory, 2), state(number, 70_000)
        for part in order:
            # Only the first rank's text is kept.
            team[part].write(number, "text " + "x" * (shorter + 51 * part), tensors)
        snapshot = Snapshots(memory, tag=TAG, part=0, parts=1).found
        assert snapshot is not None
        assert len(snapshot.text) == len("text ") + shorter
        assert found(memory) == number


def test_memory_is_taken_beside_the_training(memory):
    (rank,) = ranks(memory, 1)
    large = state(1, 1_000_000)
    assert not rank.is_ready(large)
    thread = rank.prepare("text", large)
    assert thread is not None
    thread.join()
    assert rank.is_ready(large)
    assert rank.prepare("text", state(1)) is None


def test_snapshots_leave_memory_to_the_script(memory, monkeypatch):
    """They would take more than half of what is free: there are none, and somebody is told."""
    monkeypatch.setattr("lockstep.state.checkpoint.snapshot.memory_left", lambda: 30_000_000)
    (snapshots,) = ranks(memory, 1)
    schedule = SnapshotSchedule(snapshots, StatusPage(memory.page), leads=True)
    assert schedule.due(1) == 0
    problem = schedule.prepare("text", state(0, 1_000_000))
    assert problem == "snapshots would take 0.0 GB of memory, and 0.0 GB are free"
    assert not schedule.needs_memory
    assert not any(schedule.due(step) for step in range(2, 10))
    assert [os.fstat(one).st_size for one in memory.buffers] == [0, 0]


def visits(steps: int) -> Iterator[list[tuple[int, int]]]:
    """Yield what ranks 0 and 1 do between two exchanges, as (rank, step), in an order that may be.

    After every third step there is a second point: the end of an epoch, where nobody waits for anybody.
    """
    for step in range(8, 8 + steps):
        points = 2 if step % 3 == 0 else 1
        orders = set(itertools.permutations([0] * points + [1] * points))
        yield [(rank, step) for rank in sorted(orders)[step % len(orders)]]


def test_all_ranks_follow_the_first(memory):
    """The others come to a point before or after the first has planned the next snapshot."""
    team = ranks(memory, 2)
    page = StatusPage(memory.page)
    schedules = [SnapshotSchedule(one, page, leads=part == 0) for part, one in enumerate(team)]
    for schedule in schedules:
        assert schedule.due(7) == 0
    assert [schedule.needs_memory for schedule in schedules] == [True, False]
    schedules[0].prepare("text", state(0))
    taken: list[list[int]] = [[], []]
    for together in visits(60):
        for rank, step in together:
            number = schedules[rank].due(step)
            if number:
                began = time.monotonic()
                schedules[rank].take(number, f"text {step}", state(step), began)
                taken[rank].append(step)
        assert taken[0] == taken[1]
        assert found(memory) == taken[0][-1]
    assert taken[0][:3] == [8, 9, 10]


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_follow_the_first_though_some_are_ahead_of_it(memory, seed):
    """With late gradients: a snapshot waits for the gradients of all ranks, other steps for older ones."""
    ahead, dice = 3, random.Random(seed)
    team = ranks(memory, 2)
    page = StatusPage(memory.page)
    schedules = [
        SnapshotSchedule(one, page, leads=part == 0, ahead=ahead) for part, one in enumerate(team)
    ]
    schedules[0].prepare("text", state(0))
    steps, taken = [0, 0], [[], []]  # that are done; after which a snapshot was taken
    while min(steps) < 60:
        rank = dice.choice([r for r in (0, 1) if steps[r] <= steps[1 - r] + ahead])
        step = steps[rank] + 1
        if number := schedules[rank].due(step):
            taken[rank].append(step)
            if steps[1 - rank] < step - 1:  # it waits: the other comes to this step by itself
                for other in range(steps[1 - rank] + 1, step):
                    assert not schedules[1 - rank].due(other)
                steps[1 - rank] = step - 1
            schedules[rank].take(number, f"text {step}", state(step), time.monotonic())
        steps[rank] = step
    shorter = min(map(len, taken))
    assert shorter > 2
    assert taken[0][:shorter] == taken[1][:shorter]


def test_a_generation_that_goes_on_has_a_snapshot_of_its_first_step(memory):
    team = ranks(memory, 2)
    page = StatusPage(memory.page)
    schedules = [SnapshotSchedule(one, page, leads=part == 0) for part, one in enumerate(team)]
    for schedule in schedules:
        schedule.go_on(7)
    assert [schedule.needs_memory for schedule in schedules] == [False, False]
    for step in (8, 9):
        for schedule in schedules:
            number = schedule.due(step)
            assert number, f"a snapshot is due after step {step}"
            schedule.take(number, f"text {step}", state(step), time.monotonic())
        assert found(memory) == step


def test_a_snapshot_that_costs_much_is_taken_seldom(memory, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(
        "lockstep.state.checkpoint.snapshot_schedule.time.monotonic", lambda: clock[0]
    )
    (snapshots,) = ranks(memory, 1)
    schedule = SnapshotSchedule(snapshots, StatusPage(memory.page), leads=True)
    takes_20_ms = lambda *_: clock.__setitem__(0, clock[0] + 0.02)  # noqa: E731
    monkeypatch.setattr(Snapshots, "write", takes_20_ms)
    schedule.due(1)
    schedule.prepare("text", state(0))
    taken = []
    for step in range(2, 200):
        clock[0] += 0.1
        number = schedule.due(step)
        if number:
            taken.append(step)
            began = clock[0]
            clock[0] += 0.01  # to gather the state
            schedule.take(number, "text", state(0), began)
    assert taken[:3] == [2, 3, 4]
    distances = [b - a for a, b in itertools.pairwise(taken[3:])]
    assert set(distances) <= {30, 31}, "30 ms are 1 % of 30 steps of 100 ms"


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1500])
def test_the_last_512_losses_of_a_rank_are_kept(memory, count):
    words = LossRing.memory(memory.losses)
    ring = LossRing(words, 3)
    for number in range(count):
        ring.add(ring.key(number, 7, 1), -number)
    expected = {ring.key(n, 7, 1): -n for n in range(max(0, count - 512), count)}
    assert LossRing.read_all(words, 4) == expected
    assert LossRing.read_all(words, 3) == {}  # of other ranks
    ring.clear()
    assert LossRing.read_all(words, 4) == {}


def test_losses_that_ranks_do_not_share_are_left_out(memory):
    words = LossRing.memory(memory.losses)
    key = LossRing(words, 0).key
    for rank, value in ((0, 5), (1, 6), (1023, 5)):
        LossRing(words, rank).add(key(0, 0, 0), value)
        LossRing(words, rank).add(key(0, 1, 0), 8)
    assert LossRing.read_all(words, 1024) == {key(0, 1, 0): 8}


def test_keys_of_losses_differ(memory):
    words = LossRing.memory(memory.losses)
    places = list(itertools.product((0, 1, 1 << 30), (0, 1, (1 << 20) - 1), (0, 255)))
    keys = [LossRing(words, 0, run).key(*place) for run in (0, 1, 40) for place in places]
    assert len(set(keys)) == 54
    assert 0 not in keys
