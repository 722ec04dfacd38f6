"""Compare the traces of a script on several layouts: the first difference, and the samples visited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.tools.verify.running import LayoutResult
from lockstep.tools.verify.traces import (
    Digests,
    Key,
    LoopKey,
    TracedMicrobatch,
    Traces,
    few,
    names,
    values,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two layouts, or between two computations of a step on one layout."""

    step: int  # counted from 1
    what: str  # `seed`, `samples`, `loss`, `parameters`, `state`, `length` or `redone`
    text: str


def compare(one: Traces, other: Traces, name: str, other_name: str) -> Difference | None:
    """Return the first difference between the traces of a run on two layouts, or `None`.

    Within a step the comparison goes from causes to effects: samples, losses, parameters, other state.
    `name` and `other_name` name the layouts in messages.
    """
    # Evaluations and callbacks may change the state after the last step.
    last = max([*one.steps, *other.steps], default=0)
    differences = [
        _compare_evaluated(one, other, name, other_name),
        _compare_steps(one, other, name, other_name),
        _compare_made(last, one.ends, other.ends, name, other_name, is_end=True),
    ]
    return min(filter(None, differences), key=lambda difference: difference.step, default=None)


def _compare_steps(one: Traces, other: Traces, name: str, other_name: str) -> Difference | None:
    for number in sorted({*one.steps, *other.steps}):
        a, b = one.steps.get(number), other.steps.get(number)
        if a is None or b is None:
            short, long = (name, other_name) if a is None else (other_name, name)
            return Difference(number, "length", f"step {number} happens on {long}, not on {short}")
        difference = _compare_seen(number, a.passes, b.passes, name, other_name) or _compare_made(
            number, a.digests, b.digests, name, other_name
        )
        if difference is not None:
            return difference
    return None


def _compare_evaluated(one: Traces, other: Traces, name: str, other_name: str) -> Difference | None:
    """Return the difference of the first evaluation batch whose samples are not the same, or `None`.

    `name` and `other_name` name the two layouts in messages.
    """
    for key in sorted(one.evaluated.keys() & other.evaluated.keys(), key=one.evaluated.__getitem__):
        (step, a), (_, b) = one.evaluated[key], other.evaluated[key]
        if a != b:
            loader, epoch, _, batch, _, replica = key
            place = f"after step {step} (loader {loader}, epoch {epoch}, batch {batch}), replica {replica}"
            text = f"{place}: samples {few(a)} on {name}, {few(b)} on {other_name}, without a backward pass"
            return Difference(step, "samples", text)
    return None


def _compare_seen(
    step: int,
    one: dict[Key, TracedMicrobatch],
    other: dict[Key, TracedMicrobatch],
    name: str,
    other_name: str,
) -> Difference | None:
    for key in sorted({*one, *other}):
        _, _, epoch, _, batch, _, replica, nth = key
        place = f"step {step} (epoch {epoch}, batch {batch}), replica {replica}"
        a, b = one.get(key), other.get(key)
        if a is None or b is None:
            missing = name if a is None else other_name
            which = f"backward pass {nth + 1}" if nth else "backward pass"
            return Difference(step, "samples", f"{place}: no {which} on {missing}")
        if a.samples != b.samples:
            text = f"{place}: samples {few(a.samples)} on {name}, {few(b.samples)} on {other_name}"
            return Difference(step, "samples", text)
        if a.bits != b.bits:
            here, there = (f"{seen.value!r} ({seen.bits})" for seen in (a, b))
            text = f"{place}: the loss is {here} on {name}, {there} on {other_name}"
            return Difference(step, "loss", text)
    return None


def _compare_made(
    number: int, one: Digests, other: Digests, name: str, other_name: str, *, is_end: bool = False
) -> Difference | None:
    place = "the end of the run" if is_end else f"step {number}"
    for part in dict.fromkeys([*names(one), *names(other)]):
        is_model = part == "parameters" or part.startswith("parameters of model ")
        what = "parameters" if is_model else "state"
        for digests, layout in ((one, name), (other, other_name)):
            if len(values(digests, part)) > 1:
                text = f"{place}: the ranks of {layout} hold different {part}"
                return Difference(number, what, text)
        a, b = values(one, part), values(other, part)
        if one and other and a != b:
            verb = "are" if what == "parameters" else "is"
            equal = "equal steps" if is_end else "equal samples and losses"
            first, second = (next(iter(digests), "missing")[:19] for digests in (a, b))
            both = f"{first} on {name}, {second} on {other_name}"
            return Difference(number, what, f"{place}: {equal}, but the {part} {verb} {both}")
    return None


def redone(traces: Traces, name: str) -> Difference | None:
    """Return the first step that gave another result when it was computed again after a crash.

    The result is a `Difference`, or `None` if there is no such step. `name` names the layout in messages.
    """
    if not traces.redone:
        return None
    step, differs = min(traces.redone, key=lambda found: found[0])
    text = f"step {step} was computed again after a crash on {name} and differs: {differs}"
    return Difference(step, "redone", text)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Samples that a layout visited more than once or never, in loops that should visit each once."""

    loops: int  # number of such loops
    twice: tuple[tuple[int, int, int], ...]  # (loader, epoch, sample)
    never: tuple[tuple[int, int, int], ...]  # (loader, epoch, sample)

    @property
    def is_exact(self) -> bool:
        """Whether each loop visited each sample exactly once."""
        return not self.twice and not self.never


def coverage(traces: Traces, complete: AbstractSet[LoopKey] = frozenset()) -> Coverage:
    """Find samples that loops over loaders visited twice or never; return them with the number of loops.

    `traces` are those of one layout. Only loops that the layout's run completed are examined, and loops in
    `complete`, which the run of another layout completed. Repeated passes over a batch count once.
    """
    samples = {key: samples for key, (_, samples) in traces.evaluated.items()}
    for step in traces.steps.values():
        samples |= {key[1:-1]: seen.samples for key, seen in step.passes.items()}
    seen: dict[LoopKey, Counter[int]] = {}
    for (loader, epoch, round_, _, turn, _), own in samples.items():
        if turn == 0:
            seen.setdefault((loader, epoch, round_), Counter()).update(own)
    twice, never = [], []
    whole = traces.complete | complete
    loops = [key for key in sorted(seen) if key in whole and key[0] in traces.lengths]
    for loader, epoch, round_ in loops:
        counts = seen[loader, epoch, round_]
        twice += [(loader, epoch, sample) for sample, count in counts.items() if count > 1]
        expected = range(traces.lengths[loader])
        never += [(loader, epoch, sample) for sample in expected if sample not in counts]
    return Coverage(len(loops), tuple(twice), tuple(never))


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of `lockstep verify`: the result on each layout, the first difference, and the coverage."""

    outcomes: Sequence[LayoutResult]
    difference: Difference | None  # the earliest difference
    coverage: Coverage  # in all runs, each on the first layout where it is not exact, or the first

    @property
    def same(self) -> bool:
        """Whether all layouts end with the same weights and visited the same samples."""
        digests = {outcome.digest for outcome in self.outcomes}
        return self.difference is None and len(digests) == 1 and None not in digests

    @property
    def holds(self) -> bool:
        """Whether all layouts end with the same weights, and loops visited each sample exactly once."""
        return self.same and self.coverage.is_exact

    @property
    def warnings(self) -> list[str]:
        """The warnings about the script that its runs on all layouts printed, each once."""
        return list(dict.fromkeys(text for one in self.outcomes for text in one.warnings))

    def as_json(self) -> dict[str, Any]:
        """Return the result in JSON's types, for `lockstep verify --json`."""
        return {
            "same": self.same,
            "layouts": [
                {
                    "layout": outcome.layout.name,
                    "strategy": outcome.layout.strategy,
                    "digest": outcome.digest,
                    "steps": outcome.steps,
                    "seconds": round(outcome.seconds, 3),
                    "kills": outcome.kills,
                    "generations": outcome.generations,
                }
                for outcome in self.outcomes
            ],
            "warnings": self.warnings,
            "difference": self.difference and asdict(self.difference),
            "samples": {
                "loops": self.coverage.loops,
                "twice": len(self.coverage.twice),
                "never": len(self.coverage.never),
            },
        }


def judge(outcomes: Sequence[LayoutResult]) -> VerifyResult:
    """Compare the results on all layouts with the first one; return the first difference.

    The result also has the samples that a loop visited twice or never. Steps that were repeated after a
    restart are compared with their first results. Of a script with several runs, each run is compared with
    the run of the same number.
    """
    count = max(len(outcome.traces) for outcome in outcomes)
    runs = [[(*one.traces, *[Traces()] * count)[run] for one in outcomes] for run in range(count)]
    found = [
        replace(difference, text=f"run {number + 1} in the script: {difference.text}")
        if number
        else difference
        for number, traces in enumerate(runs)
        if (difference := _first_difference(outcomes, traces)) is not None
    ]
    if (difference := _seeds(outcomes)) is not None:
        found.insert(0, difference)
    covered = [_coverage(outcomes, traces) for traces in runs]
    whole = Coverage(
        sum(one.loops for one in covered),
        tuple(sample for one in covered for sample in one.twice),
        tuple(sample for one in covered for sample in one.never),
    )
    return VerifyResult(outcomes, found[0] if found else None, whole)


def _seeds(outcomes: Sequence[LayoutResult]) -> Difference | None:
    """Return the difference between the seeds of two layouts, or `None` if all have the same seed."""
    first = outcomes[0]
    for other in outcomes[1:]:
        if None not in (first.seed, other.seed) and first.seed != other.seed:
            both = f"{first.seed} on {first.layout}, {other.seed} on {other.layout}"
            return Difference(1, "seed", f"the seed of the run is {both}: each launch has its own")
    return None


def _first_difference(
    outcomes: Sequence[LayoutResult], traces: Sequence[Traces]
) -> Difference | None:
    """Return the difference at the first step whose results differ, or `None` if there is none.

    The results differ between two layouts, or between two computations of the step on one layout.
    `traces` are those of one run of the script on each layout, in the order of `outcomes`.
    """
    names = [str(outcome.layout) for outcome in outcomes]
    found = [redone(own, name) for own, name in zip(traces, names, strict=True)]
    others = zip(traces[1:], names[1:], strict=True)
    found += [compare(traces[0], other, names[0], name) for other, name in others]
    return min(filter(None, found), key=lambda difference: difference.step, default=None)


def _coverage(outcomes: Sequence[LayoutResult], traces: Sequence[Traces]) -> Coverage:
    """Return the first coverage that is not exact among the layouts; else that of the first layout.

    `traces` are those of one run of the script on each layout, in the order of `outcomes`.
    """
    own, complete = coverage(traces[0]), traces[0].complete
    # A layout whose ranks diverged has stopped early, so it lacks samples.
    others = zip(outcomes[1:], traces[1:], strict=True)
    known = [coverage(one, complete) for outcome, one in others if outcome.digest is not None]
    return next((one for one in (own, *known) if not one.is_exact), own)
