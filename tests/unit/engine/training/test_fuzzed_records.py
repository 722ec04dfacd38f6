"""`run.json` and manifests whose values somebody has changed: a run goes on, or says what is wrong."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine.training import context
from lockstep.errors import LockstepError
from lockstep.state.checkpoint import catalog

# A run that is refused leaves its files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: Numbers of the variants: the first ones in `make test`, all in `make test-wide`.
SEEDS = [range(20), range(20, 100)]
#: What stands in the place of a value: other types, numbers out of range, names of other files.
VALUES = [
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    float("inf"),
    float("nan"),
    "",
    "x",
    "../x",
    "\0",
    "9" * 300,
]
VALUES += [[], [1], [[]], {}, {"x": 1}, [{"x": {}}], "[" * 2000]


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in JSON."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutate(content: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Return `content` with one to three values changed, or left out."""
    content = copy.deepcopy(content)
    for _ in range(dice.randint(1, 3)):
        *way, last = dice.choice(list(places(content)) or [("x",)])
        there: Any = content
        for key in way:
            there = there[key]
        if way == [] and dice.random() < 0.2:
            content.pop(last, None)
        else:
            there[last] = copy.deepcopy(dice.choice(VALUES))
    return content


@pytest.fixture
def interrupted(make_run, tmp_path: Path) -> Callable[[], None]:
    """A run that stopped after its first epoch, with a checkpoint; returns what lets it go on."""

    def run(*, stops: bool = False) -> None:
        context.taken_directories.clear()
        with make_run(run_dir=tmp_path / "d", replicas=2, threads=1) as one:
            model = one.model(nn.Linear(2, 1))
            optimizer = one.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for _ in one.epochs(2):
                for x in one.loader(torch.ones(4, 2), batch_size=4):
                    one.backward(model(x).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                one.save()
                if stops and one.step:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(stops=True)
    return run


def fuzz(
    run: Callable[[], None], path: Path, told: Any, dumps: Callable[[Any], str], seeds: range
) -> None:
    """Let a run go on from variants of what it has written, each in a fresh copy of it."""
    directory = next(parent for parent in path.parents if parent.name == "d")
    shutil.copytree(directory, directory.with_name("whole"))
    wrong: list[str] = []
    outcomes: set[bool] = set()
    for seed in seeds:
        shutil.rmtree(directory)
        shutil.copytree(directory.with_name("whole"), directory)
        path.write_text(dumps(mutate(told, random.Random(seed))))
        try:
            run()
            outcomes.add(True)
        except LockstepError:
            outcomes.add(False)
        except Exception as error:
            wrong.append(f"mutation {seed}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert outcomes == {True, False}, "some are refused, some don't matter"


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("seeds", SEEDS)
def test_a_record_of_a_run_with_other_values(interrupted, tmp_path: Path, seeds: range) -> None:
    path = tmp_path / "d/run.json"
    fuzz(interrupted, path, json.loads(path.read_text()), json.dumps, seeds)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("seeds", SEEDS)
def test_a_manifest_with_other_values_and_a_checksum_that_fits(
    interrupted, tmp_path: Path, seeds: range
) -> None:
    (path,) = tmp_path.glob("d/checkpoints/step-*/manifest.json")
    told = json.loads(path.read_text())
    told["text"] = json.loads(told["text"])

    def dumps(content: dict[str, Any]) -> str:
        content.pop("checksum", None)
        if isinstance(content.get("text"), dict):
            content["text"] = json.dumps(content["text"])
        return json.dumps({**content, "checksum": catalog._checksum(content)})

    fuzz(interrupted, path, told, dumps, seeds)
