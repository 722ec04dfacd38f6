"""The first thing that differs between two layouts, and samples seen twice or never."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lockstep.verify.traces import Key, Seen, Traces


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that differs.

    Attributes:
        step: in which step, counted from 1.
        what: `samples`, `loss`, `parameters` or `length`.
        text: in words, with both values.
    """

    step: int
    what: str
    text: str


def compare(one: Traces, other: Traces, name: str, other_name: str) -> Difference | None:
    """Return the first step in which two layouts differ, or `None` where they never do.

    Within a step, what was seen comes before what was made: samples, losses, parameters.
    """
    for step in sorted({*one.steps, *other.steps}):
        if step not in one.steps or step not in other.steps:
            short, long = (name, other_name) if step not in one.steps else (other_name, name)
            return Difference(step, "length", f"step {step} happens on {long}, not on {short}")
        difference = _compare_seen(
            step, one.of_step(step), other.of_step(step), name, other_name
        ) or _compare_made(step, one, other, name, other_name)
        if difference is not None:
            return difference
    return None


def _compare_seen(
    step: int, one: dict[Key, Seen], other: dict[Key, Seen], name: str, other_name: str
) -> Difference | None:
    for key in sorted({*one, *other}):
        _, _, epoch, _, batch, _, replica = key
        place = f"step {step} (epoch {epoch}, batch {batch}), replica {replica}"
        a, b = one.get(key), other.get(key)
        if a is None or b is None:
            missing = name if a is None else other_name
            return Difference(step, "samples", f"{place}: no backward pass on {missing}")
        if a.samples != b.samples:
            text = (
                f"{place}: samples {_few(a.samples)} on {name}, {_few(b.samples)} on {other_name}"
            )
            return Difference(step, "samples", text)
        if a.bits != b.bits:
            text = (
                f"{place}: the loss is {a.value!r} ({a.bits}) on {name}, "
                f"{b.value!r} ({b.bits}) on {other_name}"
            )
            return Difference(step, "loss", text)
    return None


def _compare_made(
    step: int, one: Traces, other: Traces, name: str, other_name: str
) -> Difference | None:
    for traces, layout in ((one, name), (other, other_name)):
        own = traces.digests.get(step, {})
        if len(set(own.values())) > 1:
            text = f"step {step}: the ranks of {layout} hold different parameters"
            return Difference(step, "parameters", text)
    a, b = one.digests.get(step), other.digests.get(step)
    if a is not None and b is not None and {*a.values()} != {*b.values()}:
        text = (
            f"step {step}: equal samples and losses, but the parameters are "
            f"{_any(a)} on {name}, {_any(b)} on {other_name}"
        )
        return Difference(step, "parameters", text)
    return None


def _any(digests: dict[int, str]) -> str:
    return next(iter(digests.values()))[:19]


def _few(samples: tuple[int, ...]) -> str:
    return str(list(samples[:6]))[:-1] + (", …]" if len(samples) > 6 else "]")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often samples were seen in loops that should show each exactly once.

    Attributes:
        loops: how many such loops there were.
        twice: samples seen more than once in one loop: `(loader, epoch, sample)`.
        never: samples missed in one loop: `(loader, epoch, sample)`.
    """

    loops: int
    twice: tuple[tuple[int, int, int], ...]
    never: tuple[tuple[int, int, int], ...]

    @property
    def is_exact(self) -> bool:
        """Whether each loop saw each sample once."""
        return not self.twice and not self.never


def coverage(traces: Traces) -> Coverage:
    """Count the samples behind all backward passes, loop by loop; second passes are not counted."""
    seen: dict[tuple[int, int, int], Counter[int]] = {}
    for (_, loader, epoch, round_, _, turn, _), microbatch in traces.microbatches.items():
        if turn == 0:
            seen.setdefault((loader, epoch, round_), Counter()).update(microbatch.samples)
    twice, never = [], []
    loops = [key for key in sorted(seen) if key in traces.complete and key[0] in traces.lengths]
    for loader, epoch, round_ in loops:
        counts = seen[loader, epoch, round_]
        twice += [(loader, epoch, sample) for sample, count in counts.items() if count > 1]
        expected = range(traces.lengths[loader])
        never += [(loader, epoch, sample) for sample in expected if sample not in counts]
    return Coverage(len(loops), tuple(twice), tuple(never))
