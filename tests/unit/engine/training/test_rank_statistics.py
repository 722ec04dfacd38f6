"""Loops over loaders that compute without training: their results are of one rank's samples, and named."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset

Make = Callable[..., Any]


def warnings(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "samples only" in line]


def names(text: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", text)


def loader(run: Any) -> Any:
    return run.loader(TensorDataset(torch.randn(24, 4), torch.arange(24) % 3), batch_size=8)


class Meter:
    """As a metric of a script: what it has seen is an attribute."""

    def __init__(self) -> None:
        self.seen = 0
        self.name = "accuracy"

    def evaluate(self, batches: Any) -> None:
        for x, _ in batches:
            self.seen += len(x)


def by_a_loop(run: Any) -> list[str]:
    train, count, total, unused = loader(run), 0, torch.zeros(4), 0
    for x, _ in train:
        count += len(x)
        total = total + x.sum(0)
        unused += 2
    print((total / count).shape)  # noqa: T201
    return ["count", "total"]


def by_lists(run: Any) -> list[str]:
    rows: list[torch.Tensor] = []
    for x, _ in loader(run):
        row = x.mean(0)
        rows.append(row)
    torch.stack(rows)
    return ["rows"]


def by_the_last_batch(run: Any) -> list[str]:
    for x, _ in loader(run):
        last = x.sum()
    print(last)  # noqa: T201
    return ["last"]


def by_the_first_batch(run: Any) -> list[str]:
    shift = torch.zeros(4)
    for x, _ in loader(run):
        shift = x.mean(0)
        break
    print(shift)  # noqa: T201
    return ["shift"]


def by_an_object(run: Any) -> list[str]:
    Meter().evaluate(loader(run))
    return ["self.seen"]


def by_global_batches(run: Any) -> list[str]:
    count = 0
    for batch in run.batches(loader(run)):
        for x, _ in batch:
            count += len(x)
    print(count)  # noqa: T201
    return ["count"]


def by_a_generator(run: Any) -> list[str]:
    print(sum(len(x) for x, _ in loader(run)))  # noqa: T201
    return []


@pytest.mark.parametrize(
    "script",
    [
        by_a_loop,
        by_lists,
        by_the_last_batch,
        by_the_first_batch,
        by_an_object,
        by_global_batches,
        by_a_generator,
    ],
)
def test_what_a_loop_computes_is_named(
    make_run: Make, capsys: Any, script: Callable[[Any], list[str]]
) -> None:
    with make_run(replicas=2) as run:
        expected = script(run)
        (told,) = warnings(capsys)
        assert sorted(names(told)) == expected
        assert re.search(r"loop over loader 0 \(test_rank_statistics\.py:\d+\)", told)
        assert "hint: run.sum(" in told
    with make_run(replicas=1) as run:  # the only replica sees all samples, everywhere
        script(run)
    assert warnings(capsys) == []


def test_each_loader_is_named_once(make_run: Make, capsys: Any) -> None:
    with make_run(replicas=2) as run:
        train, test, count = loader(run), loader(run), 0
        for _ in range(3):
            for one in (train, test):
                for x, _ in one:
                    count += len(x)
        print(count)  # noqa: T201
    told = warnings(capsys)
    assert ["loader 0" in told[0], "loader 1" in told[1], len(told)] == [True, True, 2]


def test_training_metrics_and_what_is_not_used_are_not_named(make_run: Make, capsys: Any) -> None:
    with make_run(replicas=2) as run:
        model = run.model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train, batches = loader(run), 0
        averaged = AveragedModel(model)

        def epoch() -> Any:
            nonlocal batches
            for x, y in train:
                batches += 1
                yield F.cross_entropy(model(x), y)

        for _ in run.epochs(2):
            for x, y in train:
                loss = F.cross_entropy(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            run.log(loss=loss)
            with torch.no_grad():
                run.mean(epoch())
                run.sum(len(x) for x, _ in train)
            for x, _ in train:
                model(x)  # computes statistics, which are the run's
        update_bn(train, averaged)
        print(batches, loss)  # noqa: T201
    assert warnings(capsys) == []


def test_a_loop_behind_a_progress_bar(make_run: Make, capsys: Any) -> None:
    tqdm = pytest.importorskip("tqdm")
    with make_run(replicas=2) as run:
        count = 0
        for x, _ in tqdm.tqdm(loader(run), disable=True):
            count += len(x)
        for x, _ in tqdm.tqdm(loader(run), file=io.StringIO()):
            count += len(x)
        print(count)  # noqa: T201
    assert [names(one) for one in warnings(capsys)] == [["count"], ["count"]]
