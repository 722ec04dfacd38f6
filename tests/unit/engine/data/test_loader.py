"""The loop a user writes: microbatches, second passes, leaving early, evaluation."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, TensorDataset

from lockstep.engine.data.build import LoaderSettings, build
from lockstep.engine.data.loader import Loader
from lockstep.engine.data.microbatch import Batching, LoopKey, Microbatch, Start
from lockstep.engine.data.sources import Audited, Workers, no_audit
from lockstep.engine.layout.replicas import block

FIRST = LoopKey(3, 0, 0)


class Journal:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.began: list[Microbatch] = []
        self.left: list[bool] = []
        self.passes: list[tuple[int, int, int]] = []
        self.batches = 0
        self.shown: list[int] = []
        self.start = Start(key=FIRST)
        self.audited: Audited = no_audit
        self._rounds = 0

    def loop_begins(self, loader: int, batching: Callable[[], Batching]) -> Start:
        self.batching = batching()
        self.lines.append(("loop", loader))
        self._rounds += 1
        return replace(self.start, key=LoopKey(loader, 0, self._rounds - 1))

    def batch_begins(self, start: Start, step: int, *, shown: bool) -> None:
        if shown:
            self.shown.append(step)

    def microbatch_begins(self, microbatch: Microbatch, data: Any) -> None:
        self.began.append(microbatch)
        self.lines.append(("begin", microbatch.step, microbatch.replica, microbatch.turn))

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool) -> None:
        self.lines.append(("end", microbatch.step, microbatch.replica, microbatch.turn))
        self.left.append(left)

    def audit_plan(self, start: Start) -> Audited:
        return self.audited

    def takes(self, microbatch: Microbatch) -> bool:
        return bool(microbatch.size) or torch.is_grad_enabled()

    def pass_ends(self, microbatch: Microbatch, *, shown: bool) -> None:
        self.passes.append((microbatch.step, microbatch.replica, microbatch.turn))

    def batch_ends(self, start: Start) -> bool:
        self.batches += 1
        return start.is_over

    def loop_ends(self, start: Start, step: int, *, early: bool) -> None:
        self.lines.append(("over", *start.key, step, early))

    def fails(self, error: BaseException) -> None:
        self.lines.append(("fails", type(error)))


def loader(
    journal: Journal,
    data: Any = None,
    *,
    batch_size=4,
    replicas=2,
    ranks=1,
    rank=0,
    workers=0,
    compare=None,
) -> Loader:
    data = TensorDataset(torch.arange(10)) if data is None else data
    settings = LoaderSettings(batch_size=batch_size, workers=Workers(workers))
    source = build(data, settings, replicas, block(replicas, ranks, rank), 0)
    return Loader(source, journal, number=3, batch_size=batch_size, device=None, compare=compare)


def test_the_observer_hears_of_everything_in_order() -> None:
    journal = Journal()
    for (data,) in loader(journal, TensorDataset(torch.arange(6))):
        journal.lines.append(("body", data.tolist()))
    assert journal.lines == [
        ("loop", 3),
        ("begin", 0, 0, 0), ("body", [0, 1]), ("end", 0, 0, 0),
        ("begin", 0, 1, 0), ("body", [2, 3]), ("end", 0, 1, 0),
        ("begin", 1, 0, 0), ("body", [4]), ("end", 1, 0, 0),
        ("begin", 1, 1, 0), ("body", [5]), ("end", 1, 1, 0),
        ("over", 3, 0, 0, 2, False),
    ]  # fmt: skip


def test_the_observer_hears_how_batches_are_made() -> None:
    data = TensorDataset(torch.arange(10))
    settings = LoaderSettings(batch_size=4)
    half = RandomSampler(data, num_samples=5)
    for asked, expected in (
        (settings, (10, "sequential", False)),
        (replace(settings, shuffle=True, drop_last=True), (10, "shuffled", True)),
        (replace(settings, sampler=half), (5, "RandomSampler", False)),
    ):
        journal = Journal()
        source = build(data, asked, 2, range(2), 0)
        list(Loader(source, journal, number=0, batch_size=4, device=None))
        made = journal.batching
        assert (made.batch_size, made.samples, made.order, made.drop_last) == (4, *expected)


def test_a_break_ends_the_loop_early() -> None:
    journal = Journal()
    for _ in loader(journal):
        if journal.began[-1].step == 1:
            break
    assert journal.lines[-1] == ("over", 3, 0, 0, 1, True)
    assert [m.step for m in journal.began] == [0, 0, 1]
    assert journal.left == [False, False, True]


def test_an_exception_ends_the_loop_early() -> None:
    journal = Journal()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in loader(journal):
            raise ZeroDivisionError
    assert journal.lines[-1] == ("over", 3, 0, 0, 0, True)
    assert journal.left == [True]


@pytest.mark.parametrize("workers", [0, 1])
def test_after_a_break_the_next_loop_begins_anew(workers: int) -> None:
    journal = Journal()
    one = loader(journal, workers=workers)
    for _ in one:
        break
    rounds = [[data.tolist() for (data,) in one] for _ in range(2)]
    assert rounds[0] == rounds[1] == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
    assert [m.round for m in journal.began] == [0] + [1] * 6 + [2] * 6


def test_a_second_pass_sees_the_same_data_under_another_turn() -> None:
    journal = Journal()
    one = loader(journal)
    passes = [[[data.tolist() for (data,) in batch] for _ in range(3)] for batch in one.batches()]
    assert passes == [[batch] * 3 for batch in ([[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]])]
    assert [m.turn for m in journal.began] == [0, 0, 1, 1, 2, 2] * 3
    assert [(m.first, m.last) for m in journal.began] == [(True, False), (False, True)] * 9


def test_a_second_pass_sees_all_of_a_batch_whose_first_pass_was_left() -> None:
    one = loader(Journal())
    for batch in one.batches():
        for _ in batch:
            break
        assert len([None for _ in batch]) == 2


def test_a_pass_that_was_left_ends_its_microbatch() -> None:
    journal = Journal()
    for batch in loader(journal).batches():
        for _ in batch:
            break
    begun = [line[1:] for line in journal.lines if line[0] == "begin"]
    assert begun == [line[1:] for line in journal.lines if line[0] == "end"]


def test_leaving_a_batch_does_not_move_the_next() -> None:
    found = []
    for batch in loader(Journal()).batches():
        for (data,) in batch:
            found.append(data.tolist())
            break
    assert found == [[0, 1], [4, 5], [8]]


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize("data", [None, Numbers()], ids=["map", "stream"])
def test_a_batch_that_is_passed_over_is_not_seen_again(data: Any) -> None:
    found = []
    for number, batch in enumerate(loader(Journal(), data).batches()):
        if number != 1:
            found.append([one[0].tolist() if data is None else one.tolist() for one in batch])
    assert found == [[[0, 1], [2, 3]], [[8], [9]]]


def shown(rank: int, ranks: int) -> list[tuple[int, int, int]]:
    journal = Journal()
    for _ in loader(journal, replicas=4, rank=rank, ranks=ranks):
        pass
    return [(m.step, m.replica, m.size) for m in journal.began]


def test_stand_ins_are_shown_for_training_only() -> None:
    assert [one for one in shown(0, 1) if one[0] == 2] == [
        (2, 0, 1),
        (2, 1, 1),
        (2, 2, 0),
        (2, 3, 0),
    ]
    with torch.no_grad():
        assert [one for one in shown(0, 1) if one[0] == 2] == [(2, 0, 1), (2, 1, 1)]
        counted = [size for rank in range(3) for _, _, size in shown(rank, 3)]
        assert sum(counted) == 10
        assert 0 not in counted
        assert [one for one in shown(3, 4) if one[0] == 2] == []


def test_length_and_batch_size() -> None:
    one = loader(Journal())
    assert (len(one), one.batch_size, one.number) == (3, 4, 3)


def test_a_stream_has_no_length() -> None:
    with pytest.raises(TypeError, match="no length"):
        len(loader(Journal(), Numbers()))


class Failing(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise LookupError("sample 5")
        return index


def seen_until_error(workers: int) -> tuple[list[list[int]], str]:
    seen = []
    try:
        for data in loader(Journal(), Failing(), workers=workers):
            seen.append(data.tolist())  # noqa: PERF401 - what came before the error counts too
    except LookupError as error:
        return seen, str(error)
    return seen, "no error"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_comes_through(workers: int) -> None:
    seen, error = seen_until_error(workers)
    gc.collect()  # the workers end with the loader
    assert seen == [[0, 1], [2, 3]]
    assert "sample 5" in error


def test_a_loop_that_goes_on_begins_where_it_was() -> None:
    journal = Journal()
    journal.start = Start(key=FIRST, batch=1)
    one = loader(journal)
    assert [data.tolist() for (data,) in one] == [[4, 5], [6, 7], [8], [9]]
    assert journal.lines[-1] == ("over", 3, 0, 0, 3, False)
    journal.start = Start(key=FIRST, batch=1, is_over=True)
    assert list(one) == []
    assert journal.lines[-1] == ("over", 3, 0, 1, 1, True)


def test_the_last_batch_of_a_loop_is_seen_again() -> None:
    journal = Journal()
    journal.start = Start(key=FIRST, batch=2, again=1)
    one = loader(journal)
    assert [data.tolist() for (data,) in one] == [[4, 5], [6, 7], [8], [9]]
    journal.start = Start(key=FIRST, batch=2, again=1, is_over=True)
    assert [data.tolist() for (data,) in one] == [[4, 5], [6, 7]]
    assert journal.lines[-1] == ("over", 3, 0, 1, 2, True)


def test_whole_batches_are_announced() -> None:
    journal = Journal()
    one = loader(journal)
    assert len(list(one)) == 6
    assert journal.shown == []
    assert len(list(one.batches())) == 3
    assert journal.shown == [0, 1, 2]


class Told(Dataset):
    """Draws its samples, and writes down in which process which was fetched."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()} {index}\n")
        return torch.rand(())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_loop_shows_three_samples_of_its_first_batch(
    tmp_path: Path, workers: int
) -> None:
    told: list[dict[str, str]] = []
    data = Told(tmp_path / "fetched")
    plain = [list(loader(Journal(), Told(tmp_path / "other"))) for _ in range(2)][1]
    one = loader(Journal(), data, workers=workers, compare=told.append)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    batches = iter(one)
    first = next(batches)
    if workers:
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.cat([first, *batches]), torch.cat(plain))
    (shown,) = told
    assert (shown["kind"], shown["length"], shown["shown"]) == ("Told", "10", "0, 2, 3")
    list(one)
    assert len(told) == 1
    fetched = [line.split() for line in data.path.read_text().splitlines()]
    assert sorted(int(index) for _, index in fetched) == sorted(
        [*range(10), *range(10), *(0, 2, 3), *(0, 2, 3)]
    )
    here = {pid == str(os.getpid()) for pid, _ in fetched}
    assert here == {not workers}, "with workers the dataset is not touched here"


def test_ranks_see_the_same_samples_whatever_they_hold(tmp_path: Path) -> None:
    shown: list[dict[str, str]] = []
    for rank in range(2):
        one = loader(
            Journal(), Told(tmp_path / "fetched"), ranks=2, rank=rank, compare=shown.append
        )
        list(one)
    assert shown[0] == shown[1]
