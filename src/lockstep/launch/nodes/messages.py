"""Messages between the launchers and the coordinator on launcher 0, sent as JSON, each in a line.

`LauncherReport` has a `FailureReport`, `Answer` has a `Decision`.

reports:    alive, done, a failure, leaving
decisions:  restart   the same launchers start their workers again
            round     a rendezvous round with other launchers begins: some are lost or leave, or join
            end       the launch has failed, with one message for all launchers
            done      the launch has succeeded
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from lockstep.launch.agent.failure import Decision, FailureReport

#: The longest message, in bytes.
LINE = 1 << 20


def shortened_failure(report: FailureReport) -> FailureReport:
    """Return `report`, with a short failure message if the original one is too long to send."""
    size = len(json.dumps(asdict(report)))
    if size <= LINE // 2:  # an answer contains the message and its first line
        return report
    name = report.verdict.name or "a launcher"
    text = (
        f"lockstep: {name} failed, and its verdict of {size} bytes is too long for "
        f"the other launchers; expected at most {LINE // 2}: its log says more"
    )
    brief = text.removeprefix("lockstep: ")
    verdict = replace(report.verdict, text=text, traceback=None, brief=brief)
    return replace(report, verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """State of a launcher, sent with every heartbeat.

    Attributes:
        done: whether all workers of the launcher have succeeded.
        failure: failure of its workers, if any.
        leaves: reason for which the launcher leaves; empty if it stays.
        saves: whether a launcher that leaves can wait until all ranks have saved the run's state.
        heard: whether the launcher has received the decision that ends the launch or the round; launcher 0
            waits for that before it exits.
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
class Answer:
    """The coordinator's answer to a launcher's report.

    Attributes:
        generation: generation number in the report that is answered.
        port: port of the workers' store; 0 while it is not open.
        saves: whether all ranks are to save the run's state and exit.
    """

    generation: int = 0
    decision: Decision | None = None
    port: int = 0
    saves: bool = False
