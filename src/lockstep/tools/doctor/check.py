"""`Check`: a name, measurements on each node or between nodes, and a verdict over all nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.tools.doctor.node_rendezvous import NodeGroup

Level = Literal["ok", "skipped", "warning", "failure"]
#: What a node has found, in JSON's types.
Facts = Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level  # a failure breaks trainings, a warning slows or misleads
    text: str
    advice: str = ""  # what to do about it


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asks `lockstep doctor` to look at."""

    run_dir: Path
    address: str | None = None  # host of the rendezvous


@dataclass(frozen=True, slots=True)
class NodeReports:
    """The facts that the nodes have gathered, as far as they could."""

    labels: tuple[str, ...]
    reports: tuple[Mapping[str, Facts], ...]  # by node, its facts by check
    asked: int = 1  # number of nodes that were to come

    def of(self, name: str) -> list[tuple[str, Facts]]:
        """Return the label and the facts of each node that found something for a check."""
        pairs = zip(self.labels, self.reports, strict=True)
        return [(label, report[name]) for label, report in pairs if report.get(name) is not None]

    @property
    def alone(self) -> bool:
        """Whether there is one node."""
        return len(self.labels) == 1

    @property
    def missed(self) -> bool:
        """Whether fewer nodes joined than were asked for."""
        return len(self.labels) < self.asked

    def on(self, label: str) -> str:
        """Return the prefix of a line about a node; empty where there is one node."""
        return "" if self.alone else f"{label}: "


Look = Callable[[Options], Facts]
Together = Callable[[NodeGroup, NodeReports, Options], Facts]
Judge = Callable[[NodeReports], Iterator[Finding]]
JudgeOne = Callable[[Facts], list[Finding] | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check."""

    name: str  # one word, at the beginning of its lines
    judge: Judge
    look: Look | None = None  # what each node looks at by itself, in a process of its own
    together: Together | None = None  # what the nodes do with each other, after all have looked
    seconds: float = 10.0  # timeout on a node


#: The checks of all groups that were imported.
ENTERED: list[Check] = []


def check(name: str, **fields: Any) -> Callable[[Judge], Judge]:
    """Decorate the judgement of a check; `fields` are the others of `Check`."""

    def enter(judge: Judge) -> Judge:
        ENTERED.append(Check(name=name, judge=judge, **fields))
        return judge

    return enter


def check_each(name: str, *, look: Look, seconds: float = 10.0) -> Callable[[JudgeOne], JudgeOne]:
    """Decorate a judgement of one node's facts: what is wrong there, or in words what is right."""

    def enter(judge_one: JudgeOne) -> JudgeOne:
        def judge(seen: NodeReports) -> Iterator[Finding]:
            fine = []
            for label, facts in seen.of(name):
                found = judge_one(facts)
                if isinstance(found, str):
                    fine.append((label, found))
                    continue
                for one in found:
                    yield replace(one, text=f"{seen.on(label)}{one.text}")
            if fine:
                yield Finding("ok", listed(fine, seen))

        judge.__module__ = judge_one.__module__
        check(name, look=look, seconds=seconds)(judge)
        return judge_one

    return enter


def listed(values: Sequence[tuple[str, str]], seen: NodeReports) -> str:
    """Return what nodes have, by label; in one phrase where all have the same."""
    words = {value for _, value in values}
    if len(words) == 1 and len(values) == len(seen.labels):
        return words.pop()
    return "; ".join(f"{label}: {value}" for label, value in values)


def one_line(text: str) -> str:
    """Return a message of several lines in one."""
    return re.sub(r"\n\s*", "; ", re.sub(r":\n\s*", ": ", text))
