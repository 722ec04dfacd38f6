"""Settings of fault tolerance: restarts, preemption signal, hang timeout."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.launch.given import Given
from lockstep.setting_checks import signal_of
from lockstep.settings import TABLE


@dataclass(frozen=True, slots=True)
class FaultTolerance:
    """What flags say of failures; the environment is asked for the rest.

    Attributes:
        settings: what flags give.
        signals: names of signals that end the launch as SIGTERM does, and are passed on to the ranks of
            scripts that have opened no run.

    Raises:
        UsageError: for a signal that no process can handle.
    """

    settings: Given = field(default_factory=Given)
    signals: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.signals:
            signal_of(name, "--signals-to-handle")

    def restarts(self, environ: Mapping[str, str]) -> int | None:
        """Return how many restarts were asked for, if any number was."""
        count: int | None = self.settings.value("max_restarts", environ)
        return count

    def preemption(self, environ: Mapping[str, str]) -> signal.Signals | None:
        """Return the signal that preempts, besides SIGTERM."""
        name = self.settings.value("preempt_signal", environ)
        return signal_of(name, self.settings.origin("preempt_signal")) if name else None

    def polite(self, environ: Mapping[str, str]) -> frozenset[signal.Signals]:
        """Return the signals besides SIGTERM that ask for room."""
        chosen = self.preemption(environ)
        return self.passed_on | (frozenset() if chosen is None else {chosen})

    @property
    def passed_on(self) -> frozenset[signal.Signals]:
        """Return the signals that ranks get as they come."""
        return frozenset(signal_of(name, "--signals-to-handle") for name in self.signals)

    def grace(self, environ: Mapping[str, str]) -> float:
        """Return the seconds between asking ranks to end and killing them."""
        return self._seconds("shutdown_timeout", environ)

    def patience(self, environ: Mapping[str, str]) -> float:
        """Return the seconds without any sign of life after which a rank hangs; 0 for never."""
        return self._seconds("hang_timeout", environ)

    def _seconds(self, name: str, environ: Mapping[str, str]) -> float:
        said: float | None = self.settings.value(name, environ)
        return float(TABLE[name].default) if said is None else said
