"""Audit: a microbatch is computed twice, and the bits of losses and gradients are compared.

The loop's body runs once for each microbatch. If the body keeps state outside of the run, such as a counter
or a cache, or changes parameters itself, a microbatch's result depends on how many microbatches the rank
computed before, and so on the layout. Before the microbatches of an audited batch each rank makes an extra
pass: it runs the body on a microbatch of the next rank, or on one of its own. Gradients of the extra pass
are thrown away, and optimizers do not step. If losses, gradients or optimizer settings of the two passes
differ, the body keeps state, or a processor computes wrongly. There is no tolerance.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.engine.data.microbatch import Microbatch, Start
from lockstep.engine.data.sources import Audited, no_audit
from lockstep.engine.exchange.scatter import gather_numbers
from lockstep.engine.layout.audits import Values, compare, is_due, partner
from lockstep.engine.layout.replicas import block
from lockstep.engine.recovery.state import State
from lockstep.engine.strategies.sync_batchnorm import layers
from lockstep.engine.training.audit_record import KINDS, Record
from lockstep.engine.training.audit_report import Finding, carried, collectives, wrong_rank
from lockstep.engine.training.context import Context
from lockstep.engine.training.liveness import is_at_for
from lockstep.engine.training.observations import Observation, VariableChange
from lockstep.engine.training.state_watch import StateWatch, texts
from lockstep.engine.training.variables import script_frames
from lockstep.errors import LockstepError
from lockstep.state.record import stacks
from lockstep.world import accelerator

#: Number of loops whose beginning is audited, besides the steps that are due.
_MOST_LOOPS = 8
#: Maximal number of values of variables that each of the first audits reads, number of these first audits,
#: and maximal number of values that each later audit reads.
_VALUES, _THOROUGH, _FEW_VALUES = 300, 8, 30
#: Number of loops that are remembered; those that are not over are among the latest.
_KEPT_LOOPS = 64
#: Position of a loop over a loader in the script: file, line and instruction.
_Place = tuple[str, int, int]


class Audit:
    """Audits of a run with several replicas: some microbatches are computed twice and compared.

    Args:
        context: context of the run.
        state: models, optimizers and objects of `run.register`, which the run saves.
        every: steps between two audits; 0 to audit only the beginning of loops.
        observe: function of a stack frame and a maximal number of values; returns fingerprints (short texts
            of values) of the script's variables in this frame and its callers.

    Attributes:
        record: losses and gradients of the current microbatch, if they are compared.
        was_left: whether the script has left its loop in an extra pass.
        step_was_read: whether the script has read `run.step` or `run.batch_index` in the latest loop.
        changed: names of the script's variables that extra passes have changed.
    """

    def __init__(
        self,
        context: Context,
        state: State,
        every: int,
        observe: Callable[[FrameType, int], Observation],
    ) -> None:
        self._context, self._state, self._every = context, state, every
        self._observe, self._watch = observe, StateWatch(state)
        #: By the numbers of a `LoopKey`, where the loop is, and a batch that is watched, or -1.
        self._loops: dict[tuple[int, int, int], tuple[_Place, int]] = {}
        self._begun: set[tuple[_Place, int]] = set()  # loops, with the number of the phase
        self._audited: set[tuple[_Place, int]] = set()
        self._by_next: set[_Place] = set()  # lines that take microbatches outside of a `for`
        self._trained: set[_Place] = set()  # loops whose body has run a backward pass
        self._phase = self._calls = 0
        self._takes = self._has_extra = self._left = False
        self.record: Record | None = None
        self._extra: Record | None = None
        self._before: tuple[Observation, dict[str, str]] = Observation(), {}
        self._found: list[VariableChange] = []
        self._agreed = 0  # audits without a difference since the (re)start
        #: Called when an audit has found a difference: states saved after the previous audit may be wrong.
        self.distrust: Callable[[], None] = lambda: None
        self._has_failed = self._is_off = False
        self._warned: set[str] = set()
        self.was_left = self.step_was_read = False
        self.changed: set[str] = set()

    # --- which microbatches ----------------------------------------------------------------------

    def plan(self, start: Start, phase: int, steps: int) -> Audited:
        """Return a function that maps a batch's number to the replica that an audit computes again.

        The function returns `None` for a batch without an audit. Audited are all steps for which `is_due`
        is true, and one batch in each of the run's first loops. This is the first batch, or the second if
        the loop has run no backward pass yet, since a script may take the first batch alone, by `next`.

        `start`: position at which the loop begins. `phase`: number of calls of `run.epochs` so far.
        `steps`: number of finished steps before batch `start.batch`.
        """
        self.warn_of_counts()
        self.was_left = self._has_extra = False
        place, which = _place(sys._getframe()), start.key
        self._loops[which] = place, -1
        for old in list(self._loops)[:-_KEPT_LOOPS]:
            del self._loops[old]
        trains = any(m.parameters and m.module.training for m in self._state.models)
        if self._is_off or start.is_over or not (trains and torch.is_grad_enabled()):
            return no_audit
        if _is_taken_by_next(sys._getframe()):
            self._by_next.add(place)  # perhaps a look at the first batch alone
            return no_audit
        replica, loop = self._replica(), (place, phase)
        if loop not in self._begun and len(self._begun) < _MOST_LOOPS:
            self._begun.add(loop)
            self._loops[which] = place, start.batch
        is_new = loop in self._begun and loop not in self._audited
        first = 0 if place in self._trained else 1
        self._phase = phase

        def audited(batch: int) -> int | None:
            ahead = batch - start.batch
            due = ahead >= 0 and bool(self._every) and is_due(steps + ahead + 1, self._every)
            return replica if due or (is_new and ahead == first) else None

        return audited

    def takes(self, microbatch: Microbatch) -> bool:
        """Whether to run the loop's body on `microbatch`, the extra microbatch of an audit.

        True if the loop has run a backward pass before and audits are on. All iterations over one global
        batch get the answer of the first iteration, so that each of them yields equally many microbatches.
        """
        if not microbatch.turn:
            self._takes = self._loops[microbatch[:3]][0] in self._trained and not self._is_off
        return self._takes

    def trains(self, microbatch: Microbatch) -> None:
        """Record that the loop's body ran a backward pass.

        Warn if the script takes microbatches by `next`: the audit cannot repeat such a loop's body.
        """
        place = self._loops[microbatch[:3]][0]
        self._trained.add(place)
        if place in self._by_next:
            self._warn_once(
                "next",
                f"{Path(place[0]).name}:{place[1]} takes microbatches by next(): a step "
                "needs as many calls as the rank hosts replicas, and the audit does not watch this loop; "
                "hint: for x, y in loader: …, or while run.step < N: …",
            )

    def _replica(self) -> int:
        """Return the replica that this rank computes again in an audit, to compare results.

        It is the last replica of the next rank or, if no other rank can compute this rank's replicas, this
        rank's own last replica.
        """
        context = self._context
        if self._is_alone:
            return context.dims.block[-1]
        world = context.world
        return block(context.replicas, world.size, partner(world.rank, world.size))[-1]

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank can compute a microbatch of this rank, to compare the bits.

        True on a single rank, if ranks have different models or different parts of a model, and with
        BatchNorm layers that communicate.
        """
        models = self._state.models
        return (
            self._context.group is None
            or self._context.dims.mesh.model > 1
            or any(m.is_split or m.steps_locally or any(layers(m.module)) for m in models)
        )

    # --- passes ----------------------------------------------------------------------------------

    def begins(self, microbatch: Microbatch, data: Any) -> None:
        """Record that the outermost loop's body begins a microbatch, perhaps an audit's extra one.

        `data`: the collated samples of the microbatch.
        """
        self.was_left = False
        place, watched = self._loops.get(microbatch[:3], (None, -1))
        is_own = microbatch.last and self._extra is not None
        self.record = Record() if microbatch.audit or is_own else None
        if self.record is not None:
            self._guarded(partial(self.record.samples_are, data))
        if microbatch.audit:
            self._extra, self._has_extra = None, True
            if place is not None:
                self._audited.add((place, self._phase))
            self._guarded(self._look_before)
            return
        if microbatch.step == watched:
            self._guarded(self._watch.begins)

    def step(self, act: Callable[[], Any]) -> Any:
        """Call `act`, which performs the step of an optimizer; return its result.

        In an audited microbatch no other code may change parameters.
        """
        return self._watch.step(act) if self._watch.is_on else act()

    def ends(self, microbatch: Microbatch, step: int, *, left: bool) -> None:
        """Record that the loop's body has computed a microbatch.

        If an audit computed the microbatch twice, losses, gradients and optimizer settings are compared.
        `step`: number of the step. `left`: whether `break` or an exception ended the body.

        Raises:
            AuditError: if the body depends on earlier passes, or a rank computes wrongly.
        """
        record, self.record = self.record, None
        self.was_left = left and microbatch.audit
        if left:
            self._extra = None
            self._watch.drop()
            self._left = not microbatch.audit and self._has_extra
        elif microbatch.audit:
            self._extra = record
            self._guarded(self._look_after)
        else:
            if self._watch.is_on:
                self._guarded(self._watch.ends)
            if record is not None and self._extra is not None:
                extra, self._extra = self._extra, None
                self._compare(microbatch, step, extra, record)
                if not self._is_off:
                    self._agreed += 1
                    self._context.record.audit_agrees(step)

    def warn_of_counts(self) -> None:
        """Warn if the script left its latest loop early and never read `run.step`.

        `run.batch_index` counts as well. A script that reads neither probably counts microbatches, whose
        number depends on the layout.
        """
        left, self._left, found, self._found = self._left, False, self._found, []
        was_read, self.step_was_read = self.step_was_read, False
        if left and not was_read:
            counts = [f", and {one.shown} counts microbatches" for one in found if one.is_count]
            self._warn_once(
                "left",
                f"a loop was left early{''.join(counts[:1])}; a count of microbatches, also that of "
                "itertools.islice, ends a loop elsewhere on another layout, and counts extra passes of the "
                "audit; hint: leave it by run.step or run.batch_index",
            )

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._context.record.warn(f"lockstep: warning: {text}")

    def _guarded(self, look: Callable[[], None]) -> None:
        """Call `look`, a function that observes the script; if it fails, switch audits off.

        The run continues then. Only a `LockstepError` is passed on.
        """
        if self._has_failed and self._is_alone:
            return  # ranks that pass through a model together make extra passes all the same
        try:
            look()
        except LockstepError:
            raise
        except Exception as error:
            self._has_failed = True
            self._warn_once(
                "failed",
                f"the audit could not look at the state of the run ({type(error).__name__}: {error}), and "
                "is off from here on; hint: --audit off",
            )

    def _observation(self) -> Observation:
        values = _VALUES if self._agreed < _THOROUGH else _FEW_VALUES
        return self._observe(sys._getframe(1), values)

    def _look_before(self) -> None:
        self._calls = _collective_calls()
        self._watch.begins(with_buffers=True)
        self._before = self._observation(), texts(self._state)

    def _look_after(self) -> None:
        """Record which of the script's variables an audit's extra pass over a microbatch has changed.

        Raises:
            AuditError: if the pass has changed parameters, or has made collective calls of its own.
        """
        calls = _collective_calls() - self._calls
        if calls and not self._is_alone:
            raise collectives(calls)
        observed, registered = self._before
        self._found = self._observation().changes_since(observed)
        self.changed.update(one.name for one in self._found)
        self._watch.ends()
        for name, text in texts(self._state).items():
            if text != registered.get(name, text):
                self._warn_once(
                    f"state of {name}",
                    f"the registered object {name} changes with each microbatch: on each rank it holds "
                    "that rank's samples; hint: run.sum, run.mean and run.gather are over all samples",
                )

    # --- both passes compute the same ----------------------------------------------------------------

    def _compare(self, microbatch: Microbatch, step: int, extra: Record, own: Record) -> None:
        if not self._is_alone:
            self._compare_ranks(step, extra, own)
            return
        kinds = _differing(extra.values(), own.values())
        if kinds:
            losses, changes = (extra.loss(), own.loss()), tuple(self._found)
            has_same = extra.samples == own.samples
            finding = Finding(microbatch.replica, step, kinds, *losses, changes, has_same)
            self._differs(step)
            raise carried(finding, f"computed twice by rank {self._context.world.rank}")

    def _compare_ranks(self, step: int, extra: Record, own: Record) -> None:
        context, size = self._context, len(KINDS)
        assert context.group is not None
        numbers = [*own.values(), *extra.values(), not self._has_failed, context.world.node_rank]
        for record in (own, extra):
            bits_of_loss = int(np.float64(record.loss()).view(np.int64))
            numbers += [bits_of_loss, record.samples]
        with context.heartbeat.collective("the audit"):
            rows = gather_numbers(numbers, context.group)
        if not all(row[2 * size] for row in rows):
            self._is_off = True
            return
        hosted: list[Values] = [tuple(row[:size]) for row in rows]
        audited: list[Values] = [tuple(row[size : 2 * size]) for row in rows]
        found = compare(hosted, audited)
        if found is None:
            return
        replica = block(context.replicas, context.world.size, found.host)[-1]
        kinds = _differing(audited[found.auditor], hosted[found.host])
        hosts, auditors = rows[found.host][-4:-2], rows[found.auditor][-2:]  # loss and samples
        once, again = np.array([auditors[0], hosts[0]], np.int64).view(np.float64).tolist()
        has_same = auditors[1] == hosts[1]
        finding = Finding(replica, step, kinds, once, again, tuple(self._found), has_same)
        by = f"computed by rank {found.auditor} and by its own rank {found.host}"
        if found.odd is None or not has_same:
            self._differs(step)
            raise carried(finding, by)
        host, device = self._machine(found.odd)
        node = rows[found.odd][2 * size + 1]
        place = f"rank {found.odd} (node {node}, {context.device.type}, host {host})"
        is_even = context.replicas % context.world.size == 0
        # A variable that the pass changed may matter, or be a sum that is only printed. On ranks that make
        # unequal numbers of passes, the first audit sees what counts them, too.
        is_clear = not finding.changes and (is_even or context.record.audits.count > 0)
        who = {"rank": found.odd, "host": host, "device": device}
        self._differs(step, **(who if is_clear else {}))
        if finding.changes:
            raise carried(finding, by, suspect=place)
        agreed = context.record.audits.confirmed or 0
        raise wrong_rank(finding, place, agreed, rank=found.odd if is_clear else None)

    def _differs(self, step: int, **who: Any) -> None:
        context = self._context
        context.record.audit_differs(step, **who)
        self.distrust()
        if not self._is_alone:
            # The launcher ends all ranks when one fails; before that, the main rank renames checkpoints.
            assert context.group is not None
            with context.heartbeat.collective("the audit"):
                gather_numbers([0], context.group)

    def _machine(self, rank: int) -> tuple[str, str]:
        """Return the names of a rank's host and device; a collective call, through the key-value store."""
        rendezvous, device = self._context.rendezvous, self._context.device
        own = socket.gethostname(), accelerator.name(device) or str(device)
        rendezvous.store.set(f"audit/{rendezvous.world.rank}", json.dumps(own))
        rendezvous.wait([f"audit/{rank}"], "the audit")
        host, name = json.loads(rendezvous.store.get(f"audit/{rank}"))
        return host, name


def _place(frame: FrameType) -> _Place:
    """Return the file, line and bytecode offset where the script takes its next microbatch.

    The script's code is the innermost user code among `frame` and its callers.
    """
    user = next(script_frames(frame), None)
    return ("", 0, 0) if user is None else (user.f_code.co_filename, user.f_lineno, user.f_lasti)


def _is_taken_by_next(frame: FrameType | None) -> bool:
    """Whether the script takes microbatches by `next(…)` instead of a `for` loop.

    The script's code is searched from `frame` outwards. A generator of the script that passes microbatches
    on is skipped: the code that iterates over the generator counts.
    """
    while frame is not None and stacks.is_own(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        if frame.f_code.co_name == "<genexpr>":
            return False  # a function such as sum, which goes through all
        frame = frame.f_back
    if frame is None or not stacks.is_users(frame.f_code.co_filename):
        return False  # a metric, or a library, which goes through all
    return not is_at_for(frame)


def _differing(once: Values, again: Values) -> tuple[str, ...]:
    return tuple(kind for kind, a, b in zip(KINDS, once, again, strict=True) if a != b)


def _collective_calls() -> int:
    """Return how many collective calls the default process group has begun so far; 0 if unknown."""
    if not dist.is_initialized():
        return 0
    group: Any = dist.distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError):  # a backend without sequence numbers
        return int(group._get_sequence_number_for_group())
    return 0
