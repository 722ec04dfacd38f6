"""Checkpointing of a run: snapshots in memory, checkpoints on disk, preemption."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lockstep.engine.recovery.coordination import (
    Alone,
    Coordination,
    OnStatusPage,
    Request,
    ThroughStore,
)
from lockstep.engine.recovery.evaluations import Agreement, Evaluations
from lockstep.engine.recovery.preemption import Preempted
from lockstep.engine.recovery.resume import Search
from lockstep.engine.recovery.state import ANSWERS, State
from lockstep.engine.training.carried_variables import CarriedVariables
from lockstep.engine.training.checksums import Checksums
from lockstep.engine.training.context import Context
from lockstep.engine.training.divergence import check_states
from lockstep.engine.training.loop import Loop
from lockstep.registry import STRATEGIES
from lockstep.state.checkpoint import state_codec
from lockstep.state.checkpoint.catalog import DIRECTORY
from lockstep.state.checkpoint.disk import Checkpoints
from lockstep.state.checkpoint.position import Counters, LoopEvent, Position
from lockstep.state.checkpoint.schedule import Schedule

#: At which point memory for checkpoints is taken, and what writes them imported: in the background, but
#: not for runs that are over at once, nor where ranks would gather the state together for it.
_PREPARED_AT = 50
#: Up to which point ranks look for memory for snapshots, where they gather the state for it together.
_LOOKED_UNTIL = 1 << 14


@dataclass(slots=True)
class _Asked:
    """What the script has asked to be saved: the state at the next point."""

    best: float | None = None


class Checkpointing:
    """Looks at every point of a run whether its state is to be kept.

    Args:
        context: of the run.
        state: what the run has been told of.
        loop: where the run stands.
        coordination: with the other ranks.
        schedule: of snapshots; `None` without a launcher whose memory outlives this process.
        checkpoints: on disk.
        aligned: whether all ranks are of one launcher, and take snapshots at the same points.
        apart: whether each launcher has a part of the state only, so that all ranks agree on snapshots.
        variables: returns fingerprints of the script's variables, of the same length on all ranks.

    Attributes:
        stop_asked: whether the run was asked to end.
    """

    def __init__(
        self,
        context: Context,
        state: State,
        loop: Loop,
        coordination: Coordination,
        schedule: Schedule | None,
        checkpoints: Checkpoints,
        *,
        aligned: bool,
        apart: bool,
        variables: Callable[[], str] = str,
    ) -> None:
        self._context, self._state, self._loop = context, state, loop
        self._variables = variables
        self._coordination, self._schedule, self._checkpoints = coordination, schedule, checkpoints
        self._aligned, self._apart = aligned, apart
        # Those that no script asks for; the main rank's clock counts.
        self._every = context.settings.checkpoint_every if context.world.is_main else 0.0
        self.stop_asked = False
        self._saved = time.monotonic()
        self._asked: _Asked | None = None
        self._has_looked = False
        self._points = 0
        # No other rank has to hold the same.
        self._is_alone = context.group is None or not context.settings.exact

    def ask(self, best: float | None) -> None:
        """Save the state at the next point: when the script is done with this batch, or this epoch."""
        if self._asked is None:
            self._asked = _Asked(best)
        elif best is not None:
            self._asked.best = best

    def stop(self) -> None:
        """End the run, its state saved, at the next step that all ranks agree on."""
        self.stop_asked = True
        self._coordination.ask("stop")

    def at_point(self) -> None:
        """The state is whole: keep it, where that is due.

        Raises:
            Preempted: if the run is asked to end; its state is on disk then.
            CheckpointError: if it cannot be written.
        """
        loop, schedule = self._loop, self._schedule
        if self._every and time.monotonic() - self._saved > self._every:
            self._saved = time.monotonic()
            self._coordination.ask("save")
        request = self._coordination.at_point(loop.steps)
        due = 0 if schedule is None else self._due(schedule, request)
        saves = self._asked is not None or request in ("save", "stop")
        self._points += 1
        if self._points == _PREPARED_AT and not self._state.is_gathered:
            self._checkpoints.prepare(state_codec.flatten(self._state.capture())[1])
        looks = self._looks(schedule)
        if saves or due or looks or self._points == 1:
            self._keep(schedule, due, saves=saves, looks=looks)
        if request == "stop":
            self._wait("a checkpoint")
            raise Preempted(loop.steps)

    def _keep(self, schedule: Schedule | None, due: int, *, saves: bool, looks: bool) -> None:
        began, captured = time.monotonic(), None
        if self._compares(saves=saves, due=due, looks=looks):
            captured = self._state.capture()
            self._check_same(captured)
        if not (saves or due or looks):
            return
        if saves or due:
            self._loop.note_partial()
        text, tensors = self._capture(captured)
        if schedule is not None and due:
            schedule.take(due, text, tensors, began)
        elif schedule is not None and schedule.needs_memory:
            self._prepare(schedule, text, tensors)
        if saves:
            self._save(text, tensors)

    def leave_evaluation(self, loop: LoopEvent, counters: Counters) -> None:
        """End the run in a loop that only evaluates, its state before that saved.

        Args:
            loop: the loop.
            counters: as they were when it had begun.

        Raises:
            Preempted: unless the loop belongs to a metric that trains, too.
        """
        metrics = self._loop.progress.open_metrics
        if not metrics:
            self._loop.progress.trained(replace(loop, batches=0, last=0, losses=[], events=[]))
        elif len(metrics) > 1 or metrics[0].events or metrics[0].value is not None:
            return  # what trains in a metric goes on to its next point
        else:
            counters = metrics[0].after
        position = replace(self._loop.position, counters=counters)
        captured = self._state.capture()
        if not self._is_alone:
            self._check_same(captured)
        self._save(*self._capture(captured, position))
        self._wait("a checkpoint")
        raise Preempted(self._loop.steps)

    def _due(self, schedule: Schedule, request: Request | None) -> int:
        """Return the number of the snapshot that is due now; 0 for none."""
        due = schedule.due(self._loop.steps)
        if self._apart:
            if due:
                self._coordination.ask("snapshot")
            return schedule.number if request is not None else 0
        if due and self._loop.progress.open_metrics and not self._aligned:
            # What a metric under way has seen must be had from all ranks: they take no snapshot together.
            schedule.postpone()
            return 0
        return due

    def _looks(self, schedule: Schedule | None) -> bool:
        """Whether memory for snapshots may be taken now; where ranks gather the state, all say so."""
        if schedule is None:
            return False
        if self._state.is_gathered:
            # At points 1, 2, 4, 8 and so on, until there is a snapshot: all ranks take them at the same.
            is_time = self._points & (self._points - 1) == 0 and self._points <= _LOOKED_UNTIL
            return is_time and not schedule.taken
        return schedule.needs_memory

    def _compares(self, *, saves: bool, due: int, looks: bool) -> bool:
        """Whether all ranks compare what they hold now: at the first point, and before it is kept."""
        if self._is_alone or (self._state.is_gathered and not (saves or due or looks)):
            return False  # ranks would gather it for nothing else
        kept = saves or (due > 0 and (self._aligned or self._apart))
        return kept or self._points == 1

    def _check_same(self, captured: Mapping[str, Any]) -> None:
        context, own = self._context, Checksums.of(captured)
        assert context.group is not None, "there are several ranks"
        models = [type(model.module).__name__ for model in self._state.models]
        with context.collectives.collective("the comparison of states"):
            check_states(context.rendezvous, context.group, own, self._loop.steps, models)

    def _prepare(self, schedule: Schedule, text: str, tensors: dict[str, torch.Tensor]) -> None:
        problem = schedule.prepare(text, tensors)
        if problem is not None:
            self._context.record.warn(
                f"lockstep: warning: {problem}: a rank that dies costs what was done since the last "
                "checkpoint (--checkpoint-every)"
            )

    def _save(self, text: str, tensors: dict[str, torch.Tensor]) -> None:
        asked, self._asked = self._asked, None
        self._saved = time.monotonic()
        best = None if asked is None else asked.best
        with self._context.heartbeat.collective("a checkpoint" if asked is None else "run.save"):
            self._checkpoints.save(self._loop.steps, tensors, text, best=best)

    def _capture(
        self, captured: Mapping[str, Any] | None = None, at: Position | None = None
    ) -> tuple[str, dict[str, torch.Tensor]]:
        self._context.record.flush()
        position, answers = (at or self._loop.position).as_json()
        captured = self._state.capture() if captured is None else captured
        state, tensors = state_codec.flatten({**captured, ANSWERS: answers})
        if not self._has_looked:
            self._has_looked = True
            self._check_forgotten()
        told = {"position": position, "state": state, "variables": self._variables()}
        return json.dumps(told), tensors

    def _check_forgotten(self) -> None:
        name = self._state.forgotten_scheduler()
        if name is not None:
            self._context.record.warn(
                f"lockstep: warning: a learning rate scheduler of {name} is not part of what is saved; "
                "pass it through run.scheduler(…)"
            )
        attributes = self._state.forgotten_attributes()
        if attributes is not None:
            self._context.record.warn(
                f"lockstep: warning: attributes of an optimizer are not saved, since its model is split "
                f"over ranks ({attributes}); hint: keep them in its state or its param_groups, or use "
                "strategy='ddp'"
            )

    def finish(self) -> None:
        """The script is done: what it has asked for is on disk when this returns."""
        if self._asked is not None:
            captured = self._state.capture()
            if not self._is_alone:
                self._check_same(captured)
            self._save(*self._capture(captured))
        self._wait("the end of the run")

    def _wait(self, kind: str) -> None:
        with self._context.heartbeat.collective(kind):
            self._checkpoints.wait()

    def close(self, patience: float) -> None:
        """Stop; a checkpoint that is being written has so many seconds left."""
        self._checkpoints.close(patience)


def begin(context: Context, state: State, loop: Loop, variables: CarriedVariables) -> Checkpointing:
    """Let the run begin, or resume from its newest state; return what saves it from there on.

    Raises:
        RunDirectoryError: if the directory has a checkpoint of another run.
        CheckpointError: if the disk cannot be read.
    """
    settings, world, record = context.settings, context.world, context.record
    checkpoints = Checkpoints(
        record.directory / DIRECTORY,
        asdict(context.identity),
        rank=world.rank,
        size=world.size,
        store=_store_of(context, "checkpoints"),
        keep=settings.keep,
        warn=record.warn,
        written=record.checkpoint,
    )
    memory = context.memory
    # All ranks are of one launcher, and so take snapshots at the same points.
    aligned = memory is not None and memory.snapshots.parts == world.size
    # Of a model whose tensors are cut over all ranks each launcher has parts.
    apart = STRATEGIES.find(settings.strategy).shards and not aligned
    variables.resumed = _go_on(context, state, loop, checkpoints)
    # Launchers choose their moments by themselves, where no rank gathers another's part of the state.
    takes_snapshots = aligned or apart or context.groups.mesh is None
    has_room = memory is not None and not memory.snapshots.is_spoken_for and takes_snapshots
    coordination = _coordination(context, aligned=aligned)
    checkpointing = Checkpointing(
        context,
        state,
        loop,
        coordination,
        memory.schedule if memory is not None and has_room else None,
        checkpoints,
        aligned=aligned,
        apart=apart,
        variables=variables.saved,
    )
    store = dist.PrefixStore("evaluations", context.rendezvous.store)
    agreement = None if world.size == 1 else Agreement(store, world.rank, world.size)
    leave = checkpointing.leave_evaluation
    loop.evaluations = Evaluations(state, coordination, agreement, leave)
    return checkpointing


def _go_on(context: Context, state: State, loop: Loop, checkpoints: Checkpoints) -> str:
    """Let the loop begin, or resume from the newest state that any rank finds.

    Returns:
        The fingerprints of the script's variables that are part of it.
    """
    memory = context.memory
    snapshots = None if memory is None else memory.snapshots
    is_new = context.resume_info.is_new and context.world.generation == 0
    saved = None
    if not is_new:
        saved = Search(context.rendezvous, context.group, snapshots, checkpoints).find()
    has_memory = snapshots is not None and snapshots.found is not None
    if snapshots is not None:
        snapshots.found = None
    if saved is None:
        context.record.begin(0, None)
        return ""
    position = saved.position
    context.record.begin(position.steps, saved.source)
    if memory is not None and has_memory:
        memory.schedule.go_on(position.steps)
    loop.resume(position, lambda whole: saved.restore(state, whole=whole))
    return saved.variables


def _coordination(context: Context, *, aligned: bool) -> Coordination:
    memory, world, ahead = context.memory, context.world, context.settings.staleness or 0
    if memory is not None and aligned:
        return OnStatusPage(memory.page, leads=world.is_main, ahead=ahead)
    store = _store_of(context, "agreement")
    if store is None or context.watchdog is None:
        return Alone()
    through_store = ThroughStore(store, world.rank, world.size, ahead=ahead)
    context.watchdog.also.append(through_store.look)
    return through_store


def _store_of(context: Context, purpose: str) -> dist.Store | None:
    """Return a client of the store for another thread; the main one's may be busy waiting."""
    if context.world.size == 1:
        return None
    own: dist.Store = context.rendezvous.store.clone()  # type: ignore[attr-defined]
    return dist.PrefixStore(purpose, own)
