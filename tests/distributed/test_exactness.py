"""Every way to hold a model and to let gradients meet: the class that the run states, and that it keeps it.

exact: on each of its layouts the run ends with the bits of one process. close: its weights are those of one
process, but for rounding. approximate: it recognises as many digits as one process does (A3 to A5, A17).
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.layout.classes import PRECISIONS
from lockstep.registry import EXCHANGES, STRATEGIES
from lockstep.testing import run_ranks
from tests.conftest import Lockstep
from tests.distributed import on_digits
from tests.distributed.on_digits import Told

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]

REPLICAS = 4
#: By how much a weight may differ from one process's after 60 steps: they are of the order of 1.
CLOSE = 1e-4
#: By how much a run of other mathematics may recognise fewer of the 360 digits.
WORSE = 0.03
#: How long a way is trained, in epochs of 30 steps. What is not exact has shown itself after a few.
EPOCHS = {"exact": 2, "close": 2, "approximate": 12}
#: What one process has to recognise by then.
LEARNT = {"exact": 0.5, "close": 0.5, "approximate": 0.93}


@dataclass(frozen=True)
class Way:
    """A combination, the class that it is to state, and layouts that it is tried on."""

    stated: str
    ranks: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    servers: int = 0
    norm: str = ""
    wide: bool = False

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.settings.items() if name != "exact"]
        words += [f"servers={self.servers}"] * bool(self.servers) + [self.norm] * bool(self.norm)
        return f"{self.stated}:{','.join(words) or 'auto'}:{'/'.join(map(str, self.ranks))}"


def loose(**settings: Any) -> dict[str, Any]:
    return {**settings, "exact": False}


WAYS = [
    Way("exact", (1,), {"strategy": "single"}, wide=True),
    Way("exact", (1,), {"strategy": "dp"}, wide=True),  # without a GPU, as here
    Way("exact", (2, 3), {"strategy": "ddp", "exchange": "shared-memory"}),
    Way("exact", (3, 4), {"strategy": "ddp", "exchange": "tree"}),
    Way("exact", (2,), {"strategy": "ddp", "exchange": "native"}, wide=True),
    Way("exact", (2,), {"strategy": "ps"}, servers=2, wide=True),
    Way("exact", (2,), {"strategy": "ps", "staleness": 0}, servers=1, wide=True),
    Way("exact", (2,), {"strategy": "ps", "staleness": 2}, servers=1),
    Way("exact", (3,), {"strategy": "ddp", "staleness": 2}),
    Way("exact", (1, 3), {"strategy": "fsdp"}),
    Way("exact", (2,), {"strategy": "pipeline"}),
    Way("exact", (4,), {"strategy": "pipeline", "mesh": "2x2"}, wide=True),
    Way("exact", (2, 3), {"precision": "bf16"}),
    Way("exact", (2,), {"precision": "bf16", "strategy": "fsdp"}, wide=True),
    Way("exact", (3,), {"precision": "fp16"}, wide=True),
    Way("exact", (2,), {"precision": "fp16", "strategy": "fsdp"}, wide=True),
    Way("close", (4,), loose(exchange="native"), wide=True),
    Way("close", (3,), loose(exchange="native", precision="bf16"), wide=True),
    Way("close", (2,), loose(strategy="tensor")),
    Way("close", (4,), loose(strategy="tensor", mesh="2x2"), wide=True),
    Way("close", (2,), loose(strategy="pipeline"), wide=True),
    Way("close", (2, 4), {}, norm="synced"),
    Way("close", (3,), {"strategy": "fsdp"}, norm="synced", wide=True),
    Way("close", (4,), loose(strategy="tensor", mesh="2x2", replicas=2), norm="synced", wide=True),
    Way("approximate", (2,), loose(replicas=4), norm="synced"),
    *(
        Way("approximate", (2,), loose(exchange=name), wide=name != "bf16")
        for name in EXCHANGES.where(lambda entry: entry.exactness == "approximate")
    ),
    *(
        Way("approximate", (2,), loose(strategy=name), wide=True)
        for name in STRATEGIES.where(lambda entry: entry.averages)
    ),
]


@functools.cache
def reference(precision: str, norm: str, epochs: int, staleness: int | None) -> Told:
    """One process: with all replicas, or with one where statistics are over the global batch."""
    settings = {"replicas": 1 if norm else REPLICAS, "precision": precision, "staleness": staleness}
    return run_ranks(on_digits.train, 1, settings, "plain" if norm else "", epochs)[0]


def go(way: Way, ranks: int, lockstep: Lockstep) -> Told:
    replicas = ranks if way.norm else REPLICAS
    settings, epochs = {"replicas": replicas, **way.settings}, EPOCHS[way.stated]
    if not way.servers:
        return run_ranks(on_digits.train, ranks, settings, way.norm, epochs, timeout=120)[0]
    arguments = [json.dumps(settings), "told.json", str(epochs)]
    counts = ["-n", str(ranks), "--servers", str(way.servers)]
    places = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    script = str(Path(on_digits.__file__))
    done = lockstep("run", *counts, script, *arguments, env=environ, timeout=120)
    assert done.code == 0, done.err
    told: Told = json.loads((lockstep.directory / "told.json").read_text())
    return told


@pytest.mark.parametrize(
    "way",
    [pytest.param(one, id=str(one), marks=[pytest.mark.wide] * one.wide) for one in WAYS],
)
def test_a_run_keeps_the_class_that_it_states(way: Way, lockstep: Lockstep) -> None:
    precision, late = way.settings.get("precision", "fp32"), way.settings.get("staleness")
    expected = reference(precision, way.norm, EPOCHS[way.stated], late)
    # Late gradients with these learning rates learn little in three epochs.
    assert late or expected["accuracy"] > LEARNT[way.stated]
    for ranks in way.ranks:
        told = go(way, ranks, lockstep)
        assert told["exactness"] == way.stated
        if way.stated == "exact":
            assert told["digest"] == expected["digest"]
        elif way.stated == "close":
            weights = torch.tensor(told["weights"])
            torch.testing.assert_close(
                weights, torch.tensor(expected["weights"]), rtol=0, atol=CLOSE
            )
        else:
            assert told["accuracy"] > expected["accuracy"] - WORSE
            assert told["digest"] != expected["digest"]


def test_every_name_that_a_run_takes_has_a_way() -> None:
    """`mpi` needs an MPI library (tests/mpi); `server` is what strategy ps uses."""
    for setting, names in [
        ("strategy", STRATEGIES.own),
        ("exchange", EXCHANGES.own),
        ("precision", PRECISIONS),
    ]:
        tried = {way.settings.get(setting) for way in WAYS}
        assert set(names) - tried <= {"auto", "fp32", "mpi", "server"}


def test_the_classes_tell_ways_apart() -> None:
    """Half precision is another run, not a rounding: its weights would not pass for close."""
    one, other = (torch.tensor(reference(p, "", 4, None)["weights"]) for p in ("fp32", "bf16"))
    assert (one - other).abs().max() > 10 * CLOSE
