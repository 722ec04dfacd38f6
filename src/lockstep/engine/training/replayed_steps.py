"""`ReplayedSteps`, in a run of `lockstep replay`: records samples, starts the debugger, ends the run."""

from __future__ import annotations

import json
import os
import pdb
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.recovery.state import State
from lockstep.engine.training.listeners import PointListener
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.traced_step import TracedStep
from lockstep.engine.training.variables import script_frames

#: Environment variable with the fields of `Request` as JSON, which `lockstep replay` sets.
VARIABLE = "LOCKSTEP_REPLAY"


@dataclass(frozen=True, slots=True)
class Request:
    """Steps that `lockstep replay` computes again, and actions in these steps.

    Attributes:
        step: the first step of interest, counted from 1.
        until: the step after which the run ends.
        directory: directory for each process's files with samples and with hashes.
        debugs: replica before whose microbatch in step `step` the debugger stops; `None` for none.
        anomaly: whether to switch on torch's anomaly detection in step `step`.
        saves: whether to save the state after step `until`.
        traces: step in which the output of each module is hashed; `None` for none.
    """

    step: int
    until: int
    directory: str
    debugs: int | None = None
    anomaly: bool = False
    saves: bool = False
    traces: int | None = None


class ReplayedSteps(PointListener):
    """Listener for `lockstep replay`: records samples, stops in the debugger, ends the run after a step.

    `save` requests a checkpoint after the current batch.
    """

    def __init__(
        self, request: Request, loop: Loop, state: State, save: Callable[[None], None]
    ) -> None:
        self._request, self._loop, self._save = request, loop, save
        directory = Path(request.directory)
        self._file = (directory / f"samples-{os.getpid()}.jsonl").open("w", encoding="utf-8")
        self._trace: TracedStep | None = None
        if request.traces is not None:
            self._trace = TracedStep(directory / f"trace-{os.getpid()}.jsonl", state.models)

    @staticmethod
    def of(
        environ: Mapping[str, str], loop: Loop, state: State, save: Callable[[None], None]
    ) -> ReplayedSteps | None:
        """Return the listener for the steps that `environ` requests; `None` if it requests none.

        `lockstep replay` sets the request. `save` is called to request a checkpoint after the current
        batch.
        """
        text = environ.get(VARIABLE)
        return None if not text else ReplayedSteps(Request(**json.loads(text)), loop, state, save)

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Record which samples a microbatch has, in the steps that `lockstep replay` asks for.

        In the first of these steps, also switch anomaly detection on and stop in the debugger, if asked.
        """
        request, step = self._request, self._loop.steps + 1
        if self._loop.is_replaying or not (request.step <= step <= request.until):
            return
        if not torch.is_grad_enabled():
            return  # an evaluation
        samples = microbatch.indices[: microbatch.size].tolist()
        entry = {"step": step, "loader": microbatch.loader, "replica": microbatch.replica}
        self._file.write(json.dumps({**entry, "samples": samples}) + "\n")
        self._file.flush()
        if step == request.step:
            if request.anomaly:
                torch.autograd.set_detect_anomaly(True)
            if request.debugs == microbatch.replica:
                frame = next(script_frames(sys._getframe()))
                _Debugger(nosigint=True).stop_in(frame)
        if self._trace is not None and step == request.traces:
            self._trace.microbatch_begins(microbatch)

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """End anomaly detection and the trace after their step; save the state after the last.

        The request of `lockstep replay` says which of these it wants, and at which steps.
        """
        if self._request.anomaly and step == self._request.step:
            torch.autograd.set_detect_anomaly(False)
        if self._trace is not None and step == self._request.traces:
            self._trace.step_ends()
        if self._request.saves and step == self._request.until:
            self._save(None)

    def at_point(self) -> None:
        """End the run after the last requested step, as `sys.exit(0)` would."""
        if self._loop.steps >= self._request.until:
            self._file.close()
            sys.exit(0)


class _Debugger(pdb.Pdb):
    def stop_in(self, frame: FrameType) -> None:
        """Make the debugger stop at the next line of `frame`, and nowhere before.

        Functions that are called before this line are not entered.
        """
        self.reset()
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        self.set_next(frame)
        sys.settrace(self.trace_dispatch)
