"""Fault injection for tests and `lockstep verify`: a rank kills or signals itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.world.model import World

#: Such as `kill@30,term@60`.
VARIABLE = "LOCKSTEP_FAULTS"
_KINDS = ("kill", "term")


@dataclass(slots=True)
class Faults:
    """At which steps this rank, in this generation, is to be killed or asked to end.

    Attributes:
        kill: in the backward pass of which step; 0 for none.
        term: after which steps; where the state is not whole there, at the next point at which it is.
    """

    kill: int = 0
    term: frozenset[int] = frozenset()
    _done: int | None = None  # the step up to which signals have been sent

    @staticmethod
    def of(environ: Mapping[str, str], world: World) -> Faults | None:
        """Return the faults that are this rank's; `None` without any.

        Each kill is the last rank's and happens once: the first in the first generation, the second in
        the next. Rank 0 is asked to end, in any generation that does the step.

        Raises:
            UsageError: if the variable makes no sense.
        """
        text = environ.get(VARIABLE, "")
        pairs = [_parse(word, text) for word in text.split(",") if word]
        kills = [step for kind, step in pairs if kind == "kill"]
        terms = frozenset(step for kind, step in pairs if kind == "term")
        is_last = world.rank == world.size - 1
        due = kills[world.generation] if is_last and world.generation < len(kills) else 0
        faults = Faults(due, terms if world.is_main else frozenset())
        return faults if faults.kill or faults.term else None

    def go_on(self, step: int) -> None:
        """The run resumes after step number `step`: what was to come until then has come."""
        self._done = step

    def before_backward(self, step: int) -> None:
        """The gradients of step number `step` are about to be computed."""
        if self._done is None:
            self._done = step - 1
        if step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, step: int) -> None:
        """Step number `step` is done, and the state is whole: a batch may have had several steps."""
        done, self._done = step - 1 if self._done is None else self._done, step
        if any(done < term <= step for term in self.term):
            os.kill(os.getpid(), signal.SIGTERM)


def _parse(word: str, text: str) -> tuple[str, int]:
    kind, _, step = word.partition("@")
    if kind not in _KINDS or not step.isdecimal() or int(step) < 1:
        raise UsageError(f"{VARIABLE} is {text!r}; expected words such as kill@30 or term@25")
    return kind, int(step)
