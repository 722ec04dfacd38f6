"""Parse the layouts of `--layouts`: numbers of ranks, changes of the number, kills and preemptions.

A layout is a number of ranks, such as `2`. The number may change during the run: `4>2@30>3@60` is preempted
after step 30 and continued on 2 ranks, and after step 60 on 3. Faults may follow: with `2,kill@30,term@25`
a rank is killed in step 30, and the run is preempted after step 25. Each preemption ends a launch; the next
launch is another stage of the layout.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.errors import UsageError, did_you_mean
from lockstep.tools.quantities import counted

_FAULT = re.compile(r"(kill|term)@(\d+)")
_MOVE = re.compile(r"(\d+)@(\d+)")
_EXAMPLES = 'for example --layouts 1,2,4 or --layouts 1 "4>2@30" "2,kill@30"'


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch of a layout: its number of ranks, the kills during it, and the preemption at its end."""

    ranks: int
    kills: tuple[int, ...] = ()  # steps in whose backward pass the last rank kills itself
    until: int | None = None  # step after which the launch is preempted

    @property
    def faults(self) -> tuple[str, ...]:
        """Kills and preemption in this launch, such as `kill@30`, for the variable LOCKSTEP_FAULTS."""
        preempted = () if self.until is None else (f"term@{self.until}",)
        return (*(f"kill@{step}" for step in self.kills), *preempted)


@dataclass(frozen=True, slots=True)
class RandomKills:
    """The number of random kills of workers, and the seed from which they are drawn."""

    kills: int
    seed: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout for `lockstep verify`: the launches of a run, with their ranks, kills and preemptions."""

    name: str  # as the user wrote it
    stages: tuple[Stage, ...]  # each launch continues the run of the previous one
    random_kills: RandomKills | None = None  # kills during its only launch
    strategy: str | None = None  # `None` leaves it to the script

    @property
    def ranks(self) -> int:
        """The largest number of ranks in the launches of this layout."""
        return max(stage.ranks for stage in self.stages)

    @property
    def is_disturbed(self) -> bool:
        """Whether the layout has kills or preemptions."""
        return self.random_kills is not None or any(stage.faults for stage in self.stages)

    def __str__(self) -> str:
        strategy = "" if self.strategy is None else f" with {self.strategy}"
        if self.is_disturbed:
            return f"layout {self.name}{strategy}"
        return f"{counted(self.ranks, 'rank')}{strategy}"


def parse(
    words: Sequence[str],
    random_kills: RandomKills | None = None,
    strategies: Sequence[str | None] = (None,),
) -> list[Layout]:
    """Parse words such as `1,2,4` or `2,kill@30`; return their layouts for each of `strategies`.

    With `random_kills`, one more layout is added: the largest number of ranks, with these kills.

    Raises:
        UsageError: if a word cannot be parsed, or there are fewer than two layouts.
    """
    layouts = [layout for word in words for layout in _parse_word(word)]
    if random_kills is not None:
        ranks = max(layout.ranks for layout in layouts)
        layouts.append(Layout(f"{ranks},kills={random_kills.kills}", (Stage(ranks),), random_kills))
    layouts = [replace(layout, strategy=one) for one in strategies for layout in layouts]
    if len(layouts) < 2:
        raise UsageError(
            f"--layouts {words[0]} names one layout; expected at least two to compare",
            hint=f"{_EXAMPLES}; a layout may be named twice",
        )
    return layouts


def _parse_word(word: str) -> list[Layout]:
    items: list[list[str]] = []
    for item in map(str.strip, word.split(",")):
        if not _FAULT.fullmatch(item):
            _check_no_fault(item, word)
            items.append([item])
        elif items:
            items[-1].append(item)
        else:
            raise UsageError(
                f"{item} comes before any layout in {word!r}; expected it after the one it happens to",
                hint=f'for example "2,{item}"',
            )
    return [_parse_layout(layout, faults) for layout, *faults in items]


def _check_no_fault(item: str, word: str) -> None:
    """Raise `UsageError` if `item`, a part of `word`, looks like a fault but is none, such as `kil@30`."""
    kind, at, _ = item.partition("@")
    if at and kind.isalpha():
        near = did_you_mean(kind, ("kill", "term"))
        raise UsageError(
            f"{item!r} in the layouts {word!r} is no fault; expected kill@STEP or term@STEP",
            hint='for example "2,kill@30"' if near is None or kind in near.split() else near,
        )


def _parse_layout(text: str, faults: Sequence[str]) -> Layout:
    first, *words = text.split(">")
    begun = _ranks(first, text)
    moves = [_parse_move(word, text) for word in words]
    if any(after <= before for (_, before), (_, after) in itertools.pairwise(moves)):
        raise UsageError(
            f"the steps of the layout {text!r} do not rise; expected each after the one before",
            hint='for example "4>2@30>3@60"',
        )
    steps: dict[str, list[int]] = {"term": [], "kill": []}
    for fault in faults:
        kind, _, step = fault.partition("@")
        steps[kind].append(_step(step, fault))
    # After a preemption without a change the run continues on as many ranks.
    stays = [
        ([begun, *(ranks for ranks, end in moves if end <= step)][-1], step)
        for step in steps["term"]
    ]
    ends = sorted([*moves, *stays], key=lambda end: end[1])
    name = ",".join([text, *faults])
    return Layout(name, _stages(begun, ends, sorted(steps["kill"]), name))


def _stages(
    begun: int, ends: Sequence[tuple[int, int]], kills: Sequence[int], name: str
) -> tuple[Stage, ...]:
    """Divide a run into launches, each of which ends with a preemption except for the last one.

    `begun` is the number of ranks of the first launch. `ends` has a pair for each preemption: the number of
    ranks of the next launch, and the step after which the preemption happens. `kills` are the steps in
    which a rank is killed. `name` names the layout in error messages.
    """
    stages, ranks, before = [], begun, 0
    for following, step in ends:
        if step == before:
            raise UsageError(f"the layout {name!r} is to be preempted twice after step {step}")
        own = tuple(kill for kill in kills if before < kill <= step)
        stages.append(Stage(ranks, own, step))
        ranks, before = following, step
    return (*stages, Stage(ranks, tuple(kill for kill in kills if kill > before)))


def _parse_move(move: str, text: str) -> tuple[int, int]:
    found = _MOVE.fullmatch(move)
    if found is None:
        raise UsageError(
            f"{move!r} in the layout {text!r} is no change of ranks; expected RANKS@STEP",
            hint='for example "4>2@30": 4 ranks, after step 30 only 2',
        )
    return _ranks(found[1], text), _step(found[2], text)


def _ranks(word: str, text: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        inside = "" if word == text else f" in {text!r}"
        raise UsageError(
            f"the layout {word!r}{inside} is no number of ranks; expected an integer of at least 1",
            hint=_EXAMPLES,
        )
    return int(word)


def _step(word: str, text: str) -> int:
    if int(word) < 1:
        raise UsageError(f"{text!r} names step {word}; expected 1 or a later one")
    return int(word)
