"""Read and merge the traces of a launch on one layout, such as 2 ranks with a kill in step 30.

A trace has the samples, losses and digests of parameters that a rank records in each step.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.state.record.reading import LineReader

#: Identifies a backward pass: step, loader, epoch, round, global batch, pass over this batch, replica, and
#: index of the backward pass in its microbatch.
Key = tuple[int, int, int, int, int, int, int, int]

#: Identifies a microbatch without a backward pass: loader, epoch, round, global batch, pass over this
#: batch, replica.
EvaluationKey = tuple[int, int, int, int, int, int]

#: Identifies a loop over a loader: loader, epoch, round.
LoopKey = tuple[int, int, int]

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.jsonl")


#: The digest of each model and registered object, by rank.
Digests = dict[int, dict[str, str]]


@dataclass(frozen=True, slots=True)
class TracedMicrobatch:
    """The loss and the sample ids of one replica's microbatch, read from a trace."""

    bits: str
    value: float
    samples: tuple[int, ...]


@dataclass(slots=True)
class Step:
    """One step in the traces: losses and samples of its microbatches, digests of the state after it."""

    passes: dict[Key, TracedMicrobatch] = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)  # the state after the step


@dataclass(slots=True)
class Traces:
    """The traces of all ranks on a layout, merged, without steps that a restart superseded.

    A restart from the state of step S computes the steps after S again: their first results are superseded,
    but the new results have to be equal.
    """

    steps: dict[int, Step] = field(default_factory=dict)  # by number, from 1
    lengths: dict[int, int] = field(default_factory=dict)  # of loaders that visit each sample once
    complete: set[LoopKey] = field(default_factory=set)  # loops that reached the end of their data
    #: steps that were computed again with another result, with the difference in words
    redone: list[tuple[int, str]] = field(default_factory=list)
    #: step and samples of microbatches without a backward pass; kept over restarts, since the result of an
    #: evaluation may be saved, and is not computed again then
    evaluated: dict[EvaluationKey, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    ends: Digests = field(default_factory=dict)  # the state at the end


def read_runs(directory: Path) -> tuple[Traces, ...]:
    """Return the merged traces of each run of a script, in the order of the runs in the script.

    `directory` has the trace files of the first run, and a subdirectory for each later one.
    """
    count = len(list(directory.glob("run-*")))  # runs after the first
    later = (read(directory / f"run-{number + 2}") for number in range(count))
    return read(directory), *later


def read(directory: Path) -> Traces:
    """Return the merged traces of one run from the files in `directory`; empty without files."""
    traces = Traces()
    dropped: dict[int, Step] = {}
    for _, files in sorted(generations(directory).items()):
        begin, own = _read_generation(files, traces)
        for number in [number for number in traces.steps if number > begin]:
            _merge(dropped, number, traces.steps.pop(number))
        for number in sorted(own):
            if number in dropped:
                traces.redone += _differences(number, dropped[number], own[number])
            _merge(traces.steps, number, own[number])
    return traces


def generations(directory: Path) -> dict[int, dict[int, Path]]:
    """Return the paths of the trace files in `directory`: by number of the (re)start, then by rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in directory.glob("rank-*.jsonl"):
        if name := _NAME.fullmatch(path.name):
            found.setdefault(int(name[2]), {})[int(name[1])] = path
    return found


def _read_generation(files: dict[int, Path], traces: Traces) -> tuple[float, dict[int, Step]]:
    """Read the trace files of one (re)start; return the step after which it began, and its steps.

    `files` are the paths by rank. Records that belong to no step, such as samples of evaluations, are added
    to `traces`.
    """
    # If all ranks were killed before they wrote a line, no step is superseded.
    begin = float("inf")
    steps: dict[int, Step] = {}
    traces.ends = {}
    for rank in sorted(files):
        own: dict[int, Step] = {}
        for entry in map(json.loads, LineReader(files[rank]).lines()):
            if entry["kind"] == "begin":
                begin = min(begin, entry["step"])
            else:
                _take(traces, own, rank, entry)
        for number, step in own.items():
            _merge(steps, number, step)
    return begin, steps


def _take(traces: Traces, steps: dict[int, Step], rank: int, entry: dict[str, Any]) -> None:
    kind = entry["kind"]
    if kind in ("microbatch", "seen"):
        names = ("loader", "epoch", "round", "batch", "turn", "replica")
        key: Any = tuple(entry[name] for name in names)
        number, samples = entry["step"], tuple(entry["samples"])
        if kind == "seen":
            traces.evaluated[key] = number, samples
            return
        passes = steps.setdefault(number, Step()).passes
        nth = next(n for n in itertools.count() if (number, *key, n) not in passes)
        passes[number, *key, nth] = TracedMicrobatch(entry["loss"], entry["value"], samples)
    elif kind == "step":
        steps.setdefault(entry["step"], Step()).digests[rank] = entry["digests"]
    elif kind == "end":
        traces.ends[rank] = entry["digests"]
    elif kind == "loader" and entry["exhaustive"] and entry["length"] is not None:
        traces.lengths[entry["loader"]] = entry["length"]
    elif kind == "loop" and entry["complete"]:
        traces.complete.add((entry["loader"], entry["epoch"], entry["round"]))


def _merge(steps: dict[int, Step], number: int, new: Step) -> None:
    step = steps.setdefault(number, Step())
    step.passes.update(new.passes)
    step.digests.update(new.digests)


def _differences(number: int, first: Step, again: Step) -> Iterator[tuple[int, str]]:
    """Yield (step, text) for each difference between two computations of step `number`.

    `first` is the computation before a restart, `again` the one after it. Only values that both have
    recorded are compared: either may have been killed before the end of the step.
    """
    for key in sorted(first.passes.keys() & again.passes.keys()):
        one, other = first.passes[key], again.passes[key]
        if one.samples != other.samples:
            what = f"samples {few(one.samples)}, then {few(other.samples)}"
            yield number, f"replica {key[-2]} saw {what}"
        elif one.bits != other.bits:
            what = f"{one.value!r} ({one.bits}), then {other.value!r} ({other.bits})"
            yield number, f"the loss of replica {key[-2]} was {what}"
    for name in names(first.digests):
        before, after = values(first.digests, name), values(again.digests, name)
        if before and after and before != after:
            what = f"{min(before)[:19]}, then {min(after)[:19]}"
            yield number, f"the {name} after it: {what}"


def names(digests: Digests) -> list[str]:
    """Return the names of the models, optimizers and other state of which any rank recorded a digest."""
    return list(dict.fromkeys(name for parts in digests.values() for name in parts))


def values(digests: Digests, name: str) -> set[str]:
    """Return the set of different digests that ranks recorded for the model or other state `name`.

    `missing` is in the set if only some of the ranks have this state.
    """
    found = {parts.get(name, "missing") for parts in digests.values()}
    return set() if found == {"missing"} else found


def few(samples: tuple[int, ...]) -> str:
    """Return the first six sample ids as text."""
    return str(list(samples[:6]))[:-1] + (", …]" if len(samples) > 6 else "]")
