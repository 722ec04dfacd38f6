"""Run all checks of `lockstep doctor` in order, on each node and between nodes; make the report."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from lockstep.errors import WorldError
from lockstep.launch.agent.child import Child, LostError, bounded
from lockstep.launch.nodes.config import Nodes, RendezvousConfig
from lockstep.launch.output import say
from lockstep.tools.doctor import (
    gpus,
    limits,
    links,
    network,
    reduction,
    software,
    storage,
    training,
)
from lockstep.tools.doctor.check import (
    ENTERED,
    Check,
    Finding,
    Level,
    NodeReports,
    Options,
    one_line,
)
from lockstep.tools.doctor.node_rendezvous import PATIENCE, NodeGroup, join_nodes
from lockstep.world import host
from lockstep.world.rendezvous.rank_rendezvous import chosen_interface, join_timeout

#: All checks by name, in the order of the report; importing a module registers its checks.
_GROUPS = (software, gpus, limits, storage, network, links, reduction, training)
CHECKS = {
    one.name: one for group in _GROUPS for one in ENTERED if one.judge.__module__ == group.__name__
}
#: Exit codes: no failure, failures, and nodes that did not arrive.
OK, FAILED, APART = 0, 1, 3
#: Largest number of backends whose all-reduce is tried.
_STARTERS = 2
#: Errors that facts from another version of Lockstep may raise.
_UNLIKE = (KeyError, TypeError, ValueError, IndexError, AttributeError)
#: Seconds that a node waits for other nodes beyond the time that they may take.
_SLACK = 20.0
#: Seconds that a node may take to gather its own facts: a little more than the slowest check.
_LOOKS_SECONDS = 25.0
_AT_LEAST = 0.1
_LEAVING_SECONDS = 5.0
#: Key of a node's report for errors while facts were gathered, by check.
_PROBLEMS = "problems"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of one call of `lockstep doctor`: findings, the facts of all nodes, and the exit code."""

    seen: NodeReports
    findings: tuple[tuple[str, Finding], ...]
    exit_code: int
    seconds: float  # without the wait for nodes to join
    speaks: bool  # whether this node prints the report

    @property
    def lines(self) -> Iterator[str]:
        """The lines of the report as text: one for each finding, and a last one with counts."""
        wide = max(len(name) for name, _ in self.findings)
        for name, one in self.findings:
            advice = f". Do: {one.advice}" if one.advice else ""
            yield f"{one.level:8} {name:{wide}}  {one.text}{advice}"
        counts = Counter(one.level for _, one in self.findings)
        counted = ", ".join(f"{counts[level]} {level}" for level in get_args(Level))
        count = len(self.seen.labels)
        nodes = f"{count} of {self.seen.asked} nodes" if self.seen.missed else f"{count} node(s)"
        yield f"{nodes}, {self.seconds:.1f} s: {counted}"

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dict of JSON's types."""
        return {
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 2),
            "nodes": list(self.seen.labels),
            "nodes_asked": self.seen.asked,
            "findings": [{"check": name, **asdict(one)} for name, one in self.findings],
            "facts": dict(zip(self.seen.labels, self.seen.reports, strict=True)),
        }


def examine(
    asked: Options, config: RendezvousConfig | None = None, nodes: Nodes | None = None
) -> Report:
    """Run all checks on this node, and between all nodes if there are several; return the report.

    `asked` are the command-line options that checks use. `config` is the rendezvous of the nodes, `None`
    for a single node. `nodes` has the timeout and the network interface for joining.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        # Children are forked before this process starts a thread or uses a GPU.
        looks = {name: Child(_looks(one, asked)) for name, one in CHECKS.items() if one.look}
        starters = tuple(Child(reduction.start) for _ in range(_STARTERS))
        for child in (*looks.values(), *starters):
            stack.callback(child.close)
        for child in looks.values():
            child.give(None)
        rendezvous, apart = _join(config, nodes or Nodes())
        waited = time.monotonic() - began
        rendezvous.starters = starters
        stack.callback(_leave, rendezvous)
        own = _results(looks)
        findings = [] if apart is None else [("nodes", apart)]
        gathered: list[Any] = [{_PROBLEMS: {}} for _ in rendezvous.labels]
        gathered[rendezvous.index] = own
        seen = NodeReports(
            rendezvous.labels, tuple(gathered), 1 if config is None else config.count
        )
        stage = "nodes"
        try:
            gathered = _gather(rendezvous, "looks", own, _LOOKS_SECONDS)
            seen = replace(seen, reports=tuple(gathered))
            for stage in CHECKS:
                seen = _together(stage, rendezvous, seen, asked)
        except LostError as error:
            text = f"{rendezvous.gone() or error}; what nodes do together ended there"
            advice = "look at the output of the others, and at the kernel's log"
            findings.append((stage, Finding("failure", text, advice)))
        findings += [(name, one) for name in CHECKS for one in _judged(name, seen)]
        failed = any(one.level == "failure" for _, one in findings)
        return Report(
            seen=seen,
            findings=tuple(findings),
            exit_code=APART if apart else FAILED if failed else OK,
            seconds=time.monotonic() - began - (0 if rendezvous.alone else waited),
            speaks=rendezvous.index == 0 or config is None or not config.shares_output,
        )


def _looks(one: Check, asked: Options) -> Callable[[Any], Any]:
    """Return the function that gathers facts for the check `one`, with the options `asked` bound.

    A child process calls the function; the function's own argument is ignored.
    """
    look = one.look
    assert look is not None
    return lambda _: look(asked)


def _join(config: RendezvousConfig | None, nodes: Nodes) -> tuple[NodeGroup, Finding | None]:
    """Join the other nodes at the rendezvous `config`; return the group of nodes.

    If that fails, or without `config`, the group has only this node; a failure is returned as a finding.
    `nodes` has the timeout and the network interface for joining.
    """
    alone = NodeGroup(labels=(host.name(),))
    if config is None:
        return alone, None
    seconds = nodes.join_timeout or join_timeout().total_seconds()
    say(f"lockstep: waiting for the other nodes at {config.place}, {seconds:g} s at most")
    try:
        return join_nodes(config, seconds, nodes.interface or chosen_interface()), None
    except WorldError as error:
        return alone, Finding("failure", one_line(error.message), error.hint or "")


def _results(looks: dict[str, Child]) -> dict[str, Any]:
    """Wait for the child processes in `looks`; return the facts of each, by check name.

    The key `problems` has the error of each process that failed or exceeded its check's timeout.
    """
    own: dict[str, Any] = {_PROBLEMS: {}}
    began = time.monotonic()
    for name, child in looks.items():
        left = began + CHECKS[name].seconds - time.monotonic()
        try:
            own[name] = child.result(max(_AT_LEAST, left))
        except LostError as error:
            own[_PROBLEMS][name] = str(error)
    return own


def _together(name: str, rendezvous: NodeGroup, seen: NodeReports, asked: Options) -> NodeReports:
    """Gather the facts of the check `name` that need all nodes; return `seen` with the facts added.

    `rendezvous` connects the nodes, `asked` are the command-line options.

    Raises:
        LostError: if a node does not answer any more.
    """
    one = CHECKS[name]
    if one.together is None:
        return seen
    work, problem = one.together, None
    try:
        facts = bounded(lambda: work(rendezvous, seen, asked), one.seconds)
    except (WorldError, OSError, RuntimeError) as error:
        facts, problem = None, str(error).partition("\n")[0]
    except _UNLIKE as error:
        facts, problem = None, f"{type(error).__name__} in the facts of the nodes: {error}"
    gathered = _gather(rendezvous, f"check/{name}", [facts, problem], PATIENCE)
    more = []
    for (its, why), before in zip(gathered, seen.reports, strict=True):
        problems = before[_PROBLEMS] | ({} if why is None else {name: why})
        more.append({**before, name: its, _PROBLEMS: problems})
    return replace(seen, reports=tuple(more))


def _gather(rendezvous: NodeGroup, question: str, own: Any, seconds: float) -> list[Any]:
    gathered = bounded(lambda: rendezvous.gather(question, own, seconds), seconds + _SLACK)
    return list(gathered)


def _leave(rendezvous: NodeGroup) -> None:
    with contextlib.suppress(LostError, RuntimeError):
        bounded(rendezvous.close, _LEAVING_SECONDS)


def _judged(name: str, seen: NodeReports) -> Iterator[Finding]:
    """Judge the facts in `seen` of the check `name`, and yield the findings."""
    for label, report in zip(seen.labels, seen.reports, strict=True):
        why = report[_PROBLEMS].get(name)
        if why is not None:
            advice = "run it again; if it stays, look at the kernel's log of this node"
            yield Finding("failure", f"{seen.on(label)}{why}", advice)
    if CHECKS[name].together is None or seen.of(name):  # no facts: a node was lost before
        try:
            yield from list(CHECKS[name].judge(seen))
        except _UNLIKE as error:
            each = "; ".join(
                f"{label} has {_version(report)}" for label, report in seen.of("versions")
            )
            text = (
                f"facts of the nodes cannot be compared ({type(error).__name__}: {error}): {each}"
            )
            yield Finding("failure", text, "install one version of Lockstep on all nodes")


def _version(facts: Any) -> str:
    try:
        return f"lockstep {facts['bits']['lockstep']}"
    except _UNLIKE:
        return "another version of lockstep"
