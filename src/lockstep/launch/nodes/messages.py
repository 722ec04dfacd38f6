"""Messages between launchers and the coordinator, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Literal

from lockstep.launch.agent.failure import Kind, Verdict

#: The longest message, in bytes.
LINE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """A failure of a launcher's workers.

    Attributes:
        consequence: whether another rank's failure explains it.
        time: when it happened, seconds since the epoch.
    """

    verdict: Verdict
    consequence: bool
    time: float

    @property
    def order(self) -> tuple[bool, float]:
        """A sort key: causes before consequences, early before late."""
        return self.consequence, self.time

    def shortened(self) -> FailureReport:
        """Return this report, with another verdict where a message could not hold this one."""
        size = len(json.dumps(asdict(self)))
        if size <= LINE // 2:  # an answer holds the verdict, and its brief twice
            return self
        name = self.verdict.name or "a launcher"
        text = (
            f"lockstep: {name} failed, and its verdict of {size} bytes is too long for "
            f"the other launchers; expected at most {LINE // 2}: its log says more"
        )
        brief = text.removeprefix("lockstep: ")
        verdict = replace(self.verdict, text=text, traceback=None, brief=brief)
        return replace(self, verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """State of a launcher, sent with every heartbeat.

    Attributes:
        done: whether its workers have ended well.
        failure: how they have failed.
        leaves: why it leaves, if it does.
        saves: whether it could save the run's state first, with all others.
        heard: whether it has received the last decision.
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
    """The decision for all launchers.

    Attributes:
        text: shown to the user.
        verdict: of a launch that is over.
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
    """Launcher 0's answer to a report.

    Attributes:
        port: of the store of the generation that the reporting launcher is in; 0 while there is none.
        saves: whether all are to let their ranks save the run's state and leave.
    """

    decision: Decision | None = None
    port: int = 0
    saves: bool = False


def lost_verdict(name: str, why: str, *, hint: str | None = None) -> Verdict:
    """Return the verdict over a launch that has lost a launcher."""
    lines = [f"lockstep: {name} was lost: {why}", *([f"  hint: {hint}"] if hint else [])]
    return Verdict(text="\n".join(lines), exit_code=1, name=None, traceback=None, kind=Kind.LOST)
