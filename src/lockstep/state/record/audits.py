"""`Audits`: results of a run's audits, which are kept in `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Audits:
    """Results of a run's audits, in which a rank computes a microbatch twice; equal on all ranks.

    Attributes:
        count: number of audits that found no difference.
        confirmed: last step whose state counts as right: that of the last audit without a difference, or
            the step from which the run has resumed, if it is earlier; `None` before the run begins.
        unconfirmed: whether an audit has found a difference since the (re)start; no run resumes from
            states after `confirmed` then.
        found: the audits that found a difference, with the rank that computed wrongly, if it is known.
    """

    count: int = 0
    confirmed: int | None = None
    unconfirmed: bool = False
    found: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def of(recorded: Mapping[str, Any]) -> Audits:
        """Return the `Audits` whose fields are in `recorded`; missing fields get their defaults."""
        names = ("count", "confirmed", "unconfirmed", "found")
        return Audits(**{name: recorded[name] for name in names if name in recorded})

    def begin(self, step: int) -> None:
        """Record that the run begins, or resumes, with the state after step `step`.

        `confirmed` becomes the smaller of its value and `step`, and `unconfirmed` becomes `False`.
        """
        self.confirmed = step if self.confirmed is None else min(self.confirmed, step)
        self.unconfirmed = False

    def agrees(self, step: int) -> None:
        """Record that an audit of step number `step` found equal bits in both computations."""
        self.count, self.confirmed = self.count + 1, step

    def differs(self, step: int, **who: Any) -> dict[str, Any]:
        """Record in `found` an audit of step `step` that found a difference; return the record.

        `who`: number, host and device of the rank that computed wrongly; no arguments if that is not known.
        """
        self.unconfirmed = True
        self.found.append({"step": step, "confirmed": self.confirmed, **who})
        return self.found[-1]
