"""Messages between launchers and the coordinator, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from lockstep.launch.agent.failure import Verdict
from lockstep.launch.agent.restarts import Kind

#: The longest message, in bytes.
LINE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """What a launcher says of its own failure.

    Attributes:
        verdict: its verdict.
        consequence: whether another rank's failure explains it.
        time: when it happened, seconds since the epoch.
    """

    verdict: Verdict
    consequence: bool
    time: float

    @property
    def order(self) -> tuple[bool, float]:
        """What sorts causes before consequences, and early before late."""
        return self.consequence, self.time


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """What a launcher says with every sign of life.

    Attributes:
        index: its number.
        round: the round that it is in.
        generation: the generation that it is in.
        done: whether its workers have ended well.
        failure: how they have failed.
        leaves: why it leaves, if it does.
        saves: whether it could save the run's state first, with all others.
        heard: whether it has heard the last decision.
    """

    index: int
    round: int = 1
    generation: int
    done: bool = False
    failure: FailureReport | None = None
    leaves: str = ""
    saves: bool = False
    heard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all launchers are to do.

    Attributes:
        kind: what.
        text: what the user is told of it.
        verdict: the verdict over a launch that is over.
        staying: launchers that are expected in the next round.
    """

    kind: Literal["restart", "round", "end", "done"]
    text: str = ""
    verdict: Verdict | None = None
    staying: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the round is over."""
        return self.kind != "restart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What launcher 0 answers.

    Attributes:
        decision: what it has decided, if anything.
        port: port of the store of the generation that the asking launcher is in; 0 while there is none.
        saves: whether all are to let their ranks save the run's state and leave.
    """

    decision: Decision | None = None
    port: int = 0
    saves: bool = False


def fitting(told: FailureReport) -> FailureReport:
    """Return `told`, with another verdict where a message could not hold this one."""
    size = len(json.dumps(asdict(told)))
    if size <= LINE // 2:  # an answer holds the verdict, and its brief twice
        return told
    verdict = told.verdict
    text = (
        f"lockstep: {verdict.name or 'a launcher'} failed, and its verdict of {size} bytes is too long for "
        f"the other launchers; expected at most {LINE // 2}: its log says more"
    )
    own = replace(verdict, text=text, traceback=None, brief=text.removeprefix("lockstep: "))
    return replace(told, verdict=own)


def lost_verdict(name: str, why: str, *, hint: str | None = None) -> Verdict:
    """Return the verdict over a launch that has lost a launcher."""
    lines = [f"lockstep: {name} was lost: {why}", *([f"  hint: {hint}"] if hint else [])]
    return Verdict(text="\n".join(lines), exit_code=1, name=None, traceback=None, kind=Kind.LOST)
