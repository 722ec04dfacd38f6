"""Define `Check`: a named check, with functions to gather facts on nodes and one to judge them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.tools.doctor.node_rendezvous import NodeGroup

Level = Literal["ok", "skipped", "warning", "failure"]
#: The facts that a node has gathered for a check, in JSON's types.
Facts = Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report of `lockstep doctor`: its level, its text, and advice."""

    level: Level  # a failure breaks trainings, a warning slows or misleads
    text: str
    advice: str = ""  # what the user can do


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command-line options of `lockstep doctor` that its checks read."""

    run_dir: Path
    address: str | None = None  # host of the rendezvous


@dataclass(frozen=True, slots=True)
class NodeReports:
    """The facts that the examined nodes have gathered for the checks, with the nodes' labels."""

    labels: tuple[str, ...]
    reports: tuple[Mapping[str, Facts], ...]  # by node, its facts by check
    asked: int = 1  # number of nodes that should have joined

    def of(self, name: str) -> list[tuple[str, Facts]]:
        """Return (label, facts) of each node that has facts for the check `name`."""
        pairs = zip(self.labels, self.reports, strict=True)
        return [(label, report[name]) for label, report in pairs if report.get(name) is not None]

    @property
    def alone(self) -> bool:
        """Whether only one node is examined."""
        return len(self.labels) == 1

    @property
    def missed(self) -> bool:
        """Whether fewer nodes have joined than the user wants to examine."""
        return len(self.labels) < self.asked

    def on(self, label: str) -> str:
        """Return the prefix of report lines about a node, `LABEL: `, or "" if there is only one node."""
        return "" if self.alone else f"{label}: "


Look = Callable[[Options], Facts]
Together = Callable[[NodeGroup, NodeReports, Options], Facts]
Judge = Callable[[NodeReports], Iterator[Finding]]
JudgeOne = Callable[[Facts], list[Finding] | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of `lockstep doctor`: functions to gather facts on nodes, and one to judge them.

    Facts of each node are gathered by `look`, facts that need all nodes by `together`.
    """

    name: str  # one word, at the beginning of the check's lines
    judge: Judge
    look: Look | None = None  # gathers facts on each node, in a child process
    together: Together | None = None  # gathers facts that need all nodes, after each `look`
    seconds: float = 10.0  # timeout on a node


#: The checks of all modules that were imported.
ENTERED: list[Check] = []


def check(name: str, **fields: Any) -> Callable[[Judge], Judge]:
    """Decorator that registers a check with the decorated function as its `judge`.

    `name` is the name of the check, `fields` are the other fields of `Check`.
    """

    def enter(judge: Judge) -> Judge:
        ENTERED.append(Check(name=name, judge=judge, **fields))
        return judge

    return enter


def check_each(name: str, *, look: Look, seconds: float = 10.0) -> Callable[[JudgeOne], JudgeOne]:
    """Decorator that registers a check; the decorated function judges facts of one node at a time.

    The decorated function returns findings, or a text if all is well. `name` is the name of the check.
    `look` gathers the facts on each node, in `seconds` at most.
    """

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
    """Join (node's label, value) pairs to a text, or return the one value that all nodes have.

    `seen` names all nodes.
    """
    words = {value for _, value in values}
    if len(words) == 1 and len(values) == len(seen.labels):
        return words.pop()
    return "; ".join(f"{label}: {value}" for label, value in values)


def one_line(text: str) -> str:
    """Return a message of several lines as one line, with semicolons between the lines."""
    return re.sub(r"\n\s*", "; ", re.sub(r":\n\s*", ": ", text))
