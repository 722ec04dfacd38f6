"""`StateSaver`: saves a run's state as snapshots in memory and as checkpoints on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from lockstep.engine.recovery.state import ANSWERS, State
from lockstep.engine.training.checksums import COMPARED, Checksums
from lockstep.engine.training.context import Context
from lockstep.engine.training.divergence import check_states
from lockstep.engine.training.listeners import PointListener
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.metrics import Metrics
from lockstep.registry import STRATEGIES
from lockstep.state.checkpoint import state_codec
from lockstep.state.checkpoint.catalog import Catalog
from lockstep.state.checkpoint.manager import CheckpointManager
from lockstep.state.checkpoint.position import Counters, LoopEvent, SavedPosition
from lockstep.state.checkpoint.snapshot_schedule import SnapshotSchedule

#: Number of the point at which checkpoints are prepared in the background: memory is allocated and modules
#: are imported. Short runs do without, and so do runs whose ranks would have to gather the state for it.
_PREPARED_AT = 50
#: Number of the last point at which ranks that gather the state together try to allocate snapshots' memory.
_LOOKED_UNTIL = 1 << 14


class StateSaver(PointListener):
    """Saves a run's state, after batches and epochs: as snapshots in memory, checkpoints on disk.

    Args:
        schedule: schedule of snapshots; `None` if the run takes none, as without a launcher of
            Lockstep.
        aligned: whether one launcher started all ranks, so that they take snapshots after the same
            batches.
        apart: whether each launcher's ranks have only a part of the state, so that all ranks must
            agree on the steps of snapshots.
        variables: function that returns fingerprints of the script's variables as text, of the same
            length on all ranks.
    """

    def __init__(
        self,
        context: Context,
        state: State,
        loop: Loop,
        metrics: Metrics,
        coordination: Coordination,
        schedule: SnapshotSchedule | None,
        checkpoints: CheckpointManager,
        *,
        aligned: bool,
        apart: bool,
        variables: Callable[[], str] = str,
    ) -> None:
        self._context, self._state, self._loop, self._metrics = context, state, loop, metrics
        self._variables = variables
        self._coordination, self._schedule, self._checkpoints = coordination, schedule, checkpoints
        self._aligned, self._apart = aligned, apart
        # Seconds between periodic checkpoints, which the main rank requests.
        self._every = context.settings.checkpoint_every if context.world.is_main else 0.0
        self.stop_asked = False
        self._saved = time.monotonic()
        # Whether the script has called `run.save` since the last point, and with which score.
        self._is_asked = False
        self._best: float | None = None
        self._has_looked = False
        self._points = 0
        self._steps = 0  # at the latest point
        # Whether there is no other rank whose state must have the same bits.
        self._is_alone = context.group is None or not context.settings.exact

    def ask(self, best: float | None) -> None:
        """Request a checkpoint after the current batch or epoch.

        `best`: score of the checkpoint, larger is better; `None` for a checkpoint without a score.
        """
        self._is_asked = True
        self._best = self._best if best is None else best

    def stop(self) -> None:
        """Request that all ranks save the state at the same step and then end the run."""
        self.stop_asked = True
        self._coordination.ask("stop")

    def at_point(self) -> None:
        """Take a snapshot or write a checkpoint, if one is due or requested.

        Called after each batch, epoch and `run.save`. Afterwards the run ends if its end was requested.

        Raises:
            Preempted: if the end of the run was requested; the state is on disk then.
            CheckpointError: if a checkpoint cannot be written.
        """
        steps, schedule = self._loop.steps, self._schedule
        if self._every and time.monotonic() - self._saved > self._every:
            self._saved = time.monotonic()
            self._coordination.ask("save")
        request = self._coordination.at_point(steps)
        due = 0 if schedule is None else self._due(schedule, request)
        saves = self._is_asked or request in ("save", "stop") or self._is_anchor(steps)
        self._points += 1
        if self._points == _PREPARED_AT and not self._state.is_gathered:
            self._checkpoints.prepare(state_codec.flatten(self._state.capture())[1])
        looks = self._looks(schedule)
        if saves or due or looks or self._points == 1:
            self._save_state(schedule, due, saves=saves, looks=looks)
        if request == "stop":
            self._wait("a checkpoint")
            raise Preempted(steps)

    def _is_anchor(self, steps: int) -> bool:
        """Whether to write a checkpoint for `lockstep replay` (an anchor) after step `steps`.

        True if the steps since the previous call include a multiple of the setting `anchors`.
        """
        every, before, self._steps = self._context.settings.anchors, self._steps, steps
        return bool(every) and steps // every > before // every

    def _save_state(
        self, schedule: SnapshotSchedule | None, due: int, *, saves: bool, looks: bool
    ) -> None:
        compares = self._compares(saves=saves, due=due, looks=looks)
        if not (saves or due or looks):
            if compares:
                captured = self._state.capture()
                _, tensors = state_codec.flatten({name: captured[name] for name in COMPARED})
                self._check_same(tensors, captured["registered"])
            return
        began = time.monotonic()
        self._context.record.flush()  # a rank that is killed later leaves the records of this state
        if saves or due:
            self._metrics.note_partial()
        text, tensors = self._capture(compares=compares)
        if schedule is not None and due:
            schedule.take(due, text, tensors, began)
        elif schedule is not None and schedule.needs_memory:
            problem = schedule.prepare(text, tensors)
            if problem is not None:
                self._context.record.warn(
                    f"lockstep: warning: {problem}: a rank that dies costs what was done since the last "
                    "checkpoint (--checkpoint-every)"
                )
        if saves:
            self._save(text, tensors)

    def epoch_begins(self) -> None:
        """Copy the state of each registered object, unless it is larger than 64 KiB.

        A resumed run that repeats the epoch begins with these states.
        """
        self._state.epoch_begins()

    def arrived(self) -> None:
        """Warn of evaluation loops that ran again before a resumed run reached its saved position.

        Called at the saved position.
        """
        self._steps = self._loop.steps
        again = sorted(set(self._loop.progress.evaluated_again))
        if again:
            self._context.record.warn(
                f"lockstep: warning: loops over loader {', '.join(map(str, again))} that only evaluate "
                f"have run again, with the parameters of step {self._loop.steps}; run.mean, run.sum and "
                "run.gather return what they returned before"
            )

    def leave_evaluation(self, loop: LoopEvent, counters: Counters) -> None:
        """End the run inside `loop`, which only evaluates; save the state from before the loop.

        Inside a call of `run.mean`, `run.sum` or `run.gather`, the state is that from before the call.
        Return and let the run go on if that call also trains, or is inside another one.

        `counters`: the run's counts of steps, loops and loaders when the loop began.

        Raises:
            Preempted: when the state is saved.
        """
        metrics = self._loop.progress.open_metrics
        if not metrics:
            self._loop.progress.trained(replace(loop, batches=0, last=0, losses=[], events=[]))
        elif len(metrics) > 1 or metrics[0].events or metrics[0].value is not None:
            return  # inside of a metric that trains, the run ends at the next point
        else:
            counters = metrics[0].after
        position = self._loop.progress.position(self._loop.points)
        self._save_now(replace(position, counters=counters))
        self._wait("a checkpoint")
        raise Preempted(self._loop.steps)

    def _save_now(self, at: SavedPosition | None = None) -> None:
        """Compare the state between ranks, and write it as a checkpoint.

        `at`: the position in the script to record; by default the current one.
        """
        self._context.record.flush()
        self._save(*self._capture(at, compares=not self._is_alone))

    def _due(self, schedule: SnapshotSchedule, request: Request | None) -> int:
        """Return the sequence number of the snapshot to take at this point, or 0 to take none.

        `request`: the request that all ranks carry out at this point (`snapshot`, `save` or `stop`), if
        any.
        """
        due = schedule.due(self._loop.steps)
        if self._apart:
            if due:
                self._coordination.ask("snapshot")
            return schedule.number if request is not None else 0
        if due and self._loop.progress.open_metrics and not self._aligned:
            # A metric's partial sums cover all ranks, but ranks of other launchers take no snapshot here.
            schedule.postpone()
            return 0
        return due

    def _looks(self, schedule: SnapshotSchedule | None) -> bool:
        """Return whether to allocate the shared memory for snapshots at this point, after a batch or epoch.

        `schedule`: `None` if this run takes no snapshots; then the answer is `False`. If a model's state is
        gathered from all ranks, all ranks get the same answer.
        """
        if schedule is None:
            return False
        if self._state.is_gathered:
            # At points 1, 2, 4, 8 and so on, until the first snapshot, which all ranks take together.
            is_time = self._points & (self._points - 1) == 0 and self._points <= _LOOKED_UNTIL
            return is_time and not schedule.taken
        return schedule.needs_memory

    def _compares(self, *, saves: bool, due: int, looks: bool) -> bool:
        """Return whether all ranks compare checksums of their states now.

        They do so after the first batch, and before all ranks save a checkpoint or take a snapshot
        together.

        Args:
            saves: whether a checkpoint is written now.
            due: sequence number of the snapshot to take now; 0 for none.
            looks: whether memory for snapshots is allocated now.
        """
        if self._is_alone or (self._state.is_gathered and not (saves or due or looks)):
            return False  # the gathering of the state would serve only the comparison
        kept = saves or (due > 0 and (self._aligned or self._apart))
        return kept or self._points == 1

    def _check_same(
        self, tensors: Mapping[str, torch.Tensor], registered: Mapping[str, Any]
    ) -> None:
        context, own = self._context, Checksums.of(tensors, registered)
        models = [type(model.module).__name__ for model in self._state.models]
        with context.collectives.collective("the comparison of states", own.brief()) as texts:
            check_states(context.rendezvous, texts, own, self._loop.steps, models)

    def _save(self, text: str, tensors: dict[str, torch.Tensor]) -> None:
        kind, best = "run.save" if self._is_asked else "a checkpoint", self._best
        self._is_asked, self._best = False, None
        self._saved = time.monotonic()
        with self._context.heartbeat.collective(kind):
            self._checkpoints.save(self._loop.steps, tensors, text, best=best)

    def _capture(
        self, at: SavedPosition | None = None, *, compares: bool = False
    ) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the run's state as JSON text and as tensors, which are not copied.

        `at`: the position in the script to record; by default the current one. `compares`: whether to
        compare the state with those of the other ranks, by a collective call.
        """
        at = at or self._loop.progress.position(self._loop.points)
        position, answers = at.as_json()
        captured = self._state.capture()
        state, tensors = state_codec.flatten({**captured, ANSWERS: answers})
        if compares:
            self._check_same(tensors, captured["registered"])
        if not self._has_looked:
            self._has_looked = True
            self._check_forgotten()
        saved = {"position": position, "state": state, "variables": self._variables()}
        return json.dumps({**saved, "initial": self._state.initial}), tensors

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
        """Write the checkpoint requested by `run.save`, if any; wait until all checkpoints are on disk."""
        if self._is_asked:
            self._save_now()
        self._wait("the end of the run")

    def _wait(self, kind: str) -> None:
        with self._context.heartbeat.collective(kind):
            self._checkpoints.wait()

    def close(self, patience: float) -> None:
        """Stop writing checkpoints; wait at most `patience` seconds for one that is being written."""
        self._checkpoints.close(patience)


def make_saver(
    context: Context,
    state: State,
    loop: Loop,
    metrics: Metrics,
    catalog: Catalog,
    variables: Callable[[], str],
) -> StateSaver:
    """Return the `StateSaver` of a run, which writes its snapshots and checkpoints.

    All ranks save after the same step, on which their savers agree. Call it after the newest saved state
    was loaded. `catalog`: the run's checkpoints on disk. `variables`: returns fingerprints of the script's
    variables as text, which is saved with each state.
    """
    settings, world = context.settings, context.world
    checkpoints = CheckpointManager(
        catalog,
        rank=world.rank,
        size=world.size,
        store=_store_of(context, "checkpoints"),
        keep=settings.keep,
        anchors=(settings.anchors, settings.anchors_gb * 1e9),
        written=context.record.checkpoint,
    )
    memory = context.memory
    # Whether one launcher started all ranks, which then take snapshots at the same points.
    aligned = memory is not None and memory.snapshots.parts == world.size
    # Whether each launcher has only parts of a model whose tensors are cut over all ranks.
    apart = STRATEGIES.find(settings.strategy).shards and not aligned
    # Launchers choose their points for snapshots each by itself, unless their ranks gather the state.
    takes_snapshots = aligned or apart or context.groups.mesh is None
    has_room = memory is not None and not memory.snapshots.is_of_later_run and takes_snapshots
    coordination = _coordination(context, aligned=aligned)
    checkpointing = StateSaver(
        context,
        state,
        loop,
        metrics,
        coordination,
        memory.schedule if memory is not None and has_room else None,
        checkpoints,
        aligned=aligned,
        apart=apart,
        variables=variables,
    )
    store = dist.PrefixStore("evaluations", context.rendezvous.store)
    agreement = None if world.size == 1 else Agreement(store, world.rank, world.size)
    leave = checkpointing.leave_evaluation
    loop.evaluations = Evaluations(state, coordination, agreement, leave)
    return checkpointing


def _coordination(context: Context, *, aligned: bool) -> Coordination:
    memory, world, ahead = context.memory, context.world, context.settings.staleness or 0
    if memory is not None and aligned:
        return OnStatusPage(memory.page, leads=world.is_main, ahead=ahead)
    store = _store_of(context, "agreement")
    if store is None or context.watchdog is None:
        return Alone()
    through_store = ThroughStore(store, world.rank, world.size, ahead=ahead)
    context.watchdog.also.append(through_store.poll)
    return through_store


def _store_of(context: Context, purpose: str) -> dist.Store | None:
    """Return a new client of the key-value store for another thread; `None` for a single rank.

    The main thread's client may be blocked in a wait. `purpose`: prefix of the new client's keys.
    """
    if context.world.size == 1:
        return None
    own: dist.Store = context.rendezvous.store.clone()  # type: ignore[attr-defined]
    return dist.PrefixStore(purpose, own)
