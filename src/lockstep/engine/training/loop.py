"""`Loop`: position and progress of a run's training loop, in epochs, loops, microbatches and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.engine.data.microbatch import Batching, Microbatch, Start
from lockstep.engine.data.randomness import undisturbed
from lockstep.engine.data.sources import Audited, no_audit
from lockstep.engine.layout import keys
from lockstep.engine.recovery.evaluations import Evaluations
from lockstep.engine.recovery.progress import Progress
from lockstep.engine.recovery.resume import SavedState
from lockstep.engine.recovery.state import State
from lockstep.engine.strategies.untrained_module import UntrainedModule
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.audit import Audit
from lockstep.engine.training.audit_record import Record
from lockstep.engine.training.first_error import FirstError
from lockstep.engine.training.generator_keys import GeneratorKeys
from lockstep.engine.training.listeners import Listener, PointListener, overriding
from lockstep.errors import StepError
from lockstep.state.checkpoint.position import LoopEvent


class Loop:
    """Records where a script is in its epochs, loops, microbatches and steps, and calls listeners.

    Attributes:
        epoch: number of the current epoch.
        epochs: number of epochs of the current call of `run.epochs`; 0 outside of a call.
        phases: number of calls of `run.epochs` so far.
        points: number of points so far: ends of batches and epochs at which the state was complete.
        resumed: step after which a resumed run continues; 0 for a new run.
        followed: modules that are not trained, such as averages of weights; their buffers are set
            to replica 0's on all ranks.
    """

    def __init__(
        self,
        seed: int,
        replicas: int,
        models: Sequence[WrappedModel],
        *,
        followed: Sequence[UntrainedModule] = (),
        first_error: FirstError | None = None,
    ) -> None:
        self.generators, self.progress = GeneratorKeys(seed), Progress()
        self.pass_ends = self.generators.pass_ends
        self.first_error = first_error or FirstError(replicas)
        self.fails = self.first_error.keep
        self.evaluations: Evaluations | None = None
        self.audit: Audit | None = None
        self._replicas, self._models, self.followed = replicas, models, followed
        self._listeners: list[Listener] = []
        self._point_listeners: list[PointListener] = []
        self._on_microbatch: list[Callable[[Microbatch], None]] = []
        self._on_step: list[Callable[[int, Microbatch], None]] = []
        self._on_update: list[Callable[[Optimizer], None]] = []
        self._on_point: list[Callable[[], None]] = []
        self._active: list[Microbatch] = []
        self._loops: list[LoopEvent] = []  # the current loops, the outermost first
        self._losses: list[float] = []  # recorded losses of the batch that replay computes again
        self._saved: tuple[SavedState, State] | None = None  # to resume from, until loaded
        self._fresh = False  # whether parameters were updated since the last point
        self._updated = self._has_averaged = self._has_approached = False
        self._trains = False  # whether the outermost loop has updated parameters
        self.closed = False  # whether the run has ended: further calls of its loops do nothing
        self.epoch = self.epochs = self.phases = self.points = self.resumed = 0

    def listen(self, listeners: Iterable[Listener]) -> None:
        """Register `listeners`, whose callbacks are called from now on."""
        self._listeners = [*self._listeners, *listeners]
        self._on_microbatch = overriding(self._listeners, "microbatch_begins")
        self._on_step = overriding(self._listeners, "step_ends")
        self._on_update = overriding(self._listeners, "update_begins")
        self._on_point = overriding(self._listeners, "at_point")
        self._point_listeners = [own for own in self._listeners if isinstance(own, PointListener)]

    @property
    def steps(self) -> int:
        """Number of the run's finished steps.

        While a resumed run repeats the script, it is the number at this line before the restart.
        """
        return self.progress.steps

    @property
    def updates(self) -> int:
        """Number of updates of parameters so far, including an update in the current microbatch."""
        return self.progress.steps + self._updated

    def resume(self, saved: SavedState, state: State) -> None:
        """Begin the replay of a resumed run: the script is repeated up to the position in `saved`.

        At this position the objects in `state` get the saved values.
        """
        position = saved.position
        self.progress.begin_replay(position)
        self.points, self.resumed = position.points, position.steps
        self._saved = saved, state

    @property
    def is_replaying(self) -> bool:
        """Whether a resumed run is still repeating the script's calls up to its saved position."""
        return self.progress.is_replaying

    def approach(self) -> None:
        """Load the saved state into the objects that the script has made so far, in a resumed run.

        It acts only in its first call, which comes before the first loop, epoch or metric.
        """
        if self._saved is not None and not self._has_approached:
            self._has_approached = True
            saved, state = self._saved
            with undisturbed():
                saved.restore(state, whole=False)
            self.arrive()

    def arrive(self) -> None:
        """End the replay if the script has reached the saved position, and load the whole state.

        Listeners' method `arrived` is called afterwards.
        """
        if not self.progress.has_arrived:
            return
        assert self._saved is not None, "replay has a target"
        saved, state = self._saved
        # Before replay ends, so that an error that a closed generator swallows here is raised again later.
        with undisturbed():
            saved.restore(state, whole=True)
        position, self._saved = self.progress.arrive(), None
        if self.evaluations is not None:
            self.evaluations.trained()
        self._fresh = self._updated = False
        self.points = position.points
        for listener in self._point_listeners:
            listener.arrived()

    def epoch_begins(self, epoch: int) -> None:
        """Record that an epoch begins; call listeners, but not while a resumed run repeats the script."""
        self.epoch = epoch
        self.progress.epoch_begins(epoch)
        self.arrive()
        for listener in () if self.is_replaying else self._point_listeners:
            listener.epoch_begins()
        self.generators.start(keys.EPOCH, self.progress.stretch)

    @property
    def iterations(self) -> dict[Any, int]:
        """Numbers of the current epoch and batches; keys identify `run.epochs` and the open loops."""
        numbers: dict[Any, int] = {loop.key: loop.last for loop in self._loops}
        if self.progress.is_in_epoch:
            numbers["phase", self.phases] = self.epoch
        return numbers

    @property
    def is_in_loop(self) -> bool:
        """Whether the script is in a loop over a loader."""
        return bool(self._loops)

    def point(self) -> None:
        """Call listeners where the state is complete: after a batch or epoch, or in `run.save`.

        Between two averages of local SGD the ranks' models differ, and listeners are not called.
        """
        if self.progress.is_replaying:
            return
        # A loop that was left in the middle of a batch has not synchronized the ranks' buffers.
        self.finish_buffers()
        # Each model counts the steps to its own next average. When one model has averaged, all do, since
        # otherwise there might never be a batch after which all are averaged.
        if self._has_averaged or not self._loops:
            self.average_models(waits=not self._loops)
        for model in self._models:
            if not model.is_synchronized:
                return  # local-sgd, between two averages
        self._fresh = False
        self.points += 1
        for call in self._on_point:
            call()

    @property
    def batch_index(self) -> int:
        """Number of the innermost loop's current global batch."""
        if self._loops:
            return self._loops[-1].last
        return self.require_microbatch("run.batch_index").step

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch that the body of the innermost loop computes; `None` outside of a body."""
        return self._active[-1] if self._active else None

    def require_microbatch(self, call: str) -> Microbatch:
        """Return the current microbatch; outside of a loop raise a `StepError` that names `call`."""
        if not self._active:
            raise StepError(
                f"{call} was called outside of a loop over a loader; "
                "expected to be inside, since the loader says which batch it is, and what it weighs",
                hint="make the loader with run.loader(…) and iterate over it; itertools.cycle does so "
                "once, and then gives what it has kept: loop over the loader inside `while …:`",
            )
        return self._active[-1]

    def require_common_point(self, call: str, *, of_models: bool = True) -> None:
        """Raise `StepError` if a collective call is made in a microbatch, with several replicas.

        A rank that computes several replicas would make the call more often than others. Outside of
        microbatches, broadcast replica 0's buffers and, if `of_models`, average models of local SGD.
        `call`: name of the call, for the message.
        """
        self.first_error.check()
        if self._active and self._replicas > 1:
            raise StepError(
                f"{call} was called inside a microbatch; with {self._replicas} replicas, a rank that "
                "hosts several would call it more often than one that hosts one",
                hint="call it after the loop, or between the batches of "
                "`for batch in run.batches(loader): …`",
            )
        self.finish_buffers()
        if of_models:
            self.average_models()

    def finish_buffers(self) -> None:
        """Broadcast replica 0's buffers if the script left the last batch by `break`; a collective call."""
        for module in self._buffered:
            module.buffers.finish()

    @property
    def _buffered(self) -> list[WrappedModel | UntrainedModule]:
        return [*self._models, *self.followed]

    def average_models(self, *, waits: bool = True) -> None:
        """Average the ranks' models of local SGD; with `waits`, also wait for updates from servers."""
        if not self._active:
            self._has_averaged = False
            for model in self._models:
                model.synchronize()
                if waits:
                    model.show_newest()

    def acts_now(self) -> bool:
        """Whether `step()` updates parameters now: outside of loops, or in a batch's last microbatch."""
        return not self._active or self._active[-1].last

    def step_is_read(self) -> None:
        """Record that the script reads `run.step` or `run.batch_index`, perhaps to decide on a `break`."""
        if self.audit is not None:
            self.audit.step_was_read = True

    def updated(self) -> None:
        """Record that an optimizer updates its parameters now."""
        self._updated = True

    def update_begins(self, optimizer: Optimizer) -> None:
        """Call listeners before an optimizer updates its parameters."""
        for call in self._on_update:
            call(optimizer)

    def stepped(self, model: WrappedModel) -> None:
        """Record a step of a model trained by local SGD, and whether the ranks averaged the model in it."""
        self._has_averaged |= model.is_synchronized

    def loop_begins(self, loader: int, batching: Callable[[], Batching]) -> Start:
        """Record that a loop over loader number `loader` begins; return its starting position.

        The position includes epoch, round and first batch. `batching`: function that returns how the loader
        makes batches.

        Raises:
            StepError: inside a microbatch, with several replicas.
            RunDirectoryError: if the loop resumes in its middle, but makes other batches than
                before.
        """
        self.require_common_point("iterating over a loader")
        self.approach()
        start = self.progress.loop_begins(loader, batching())
        loop: LoopEvent = start.loop
        self.arrive()
        if not self._loops:
            self._trains = start.is_over or start.again is not None or start.batch > 0
            self._losses = [] if start.again is None else [float(loss) for loss in loop.losses]
            if self.evaluations is not None and not (self._trains or self.is_replaying):
                self.evaluations.begins(loop, self.progress.counters())
        self._loops.append(loop)
        for listener in self._listeners:
            listener.loop_begins(start.key)
        return start

    def batch_begins(self, start: Start, step: int, *, shown: bool) -> None:
        """Record that global batch number `step` begins in the loop that began at `start`.

        `shown`: whether the script iterates over `run.batches`. Then its code may draw random numbers
        before the first microbatch, and the random generators are set for this code.
        """
        loop: LoopEvent = start.loop
        if shown:
            self.generators.start(keys.BETWEEN, *loop.key, step, -1)
        if start.again is None or not self.progress.is_replaying:  # else replay computes it again
            loop.last, loop.before = step, self.progress.steps
            loop.losses.clear()
            loop.events.clear()

    def audit_plan(self, start: Start) -> Audited:
        """Return a function that maps a batch's number to the replica that an audit computes again.

        The function returns `None` for a batch without an audit. `start`: position at which the loop
        begins.
        """
        if self.audit is None:
            return no_audit
        loop: LoopEvent = start.loop
        steps = self.progress.steps if start.again is None else loop.steps
        return self.audit.plan(start, self.phases, steps)

    def takes(self, microbatch: Microbatch) -> bool:
        """Whether the loop yields `microbatch` to the script.

        A microbatch without samples is yielded with gradients enabled, or if a model is split over ranks or
        changes buffers in forward passes, since then every rank must compute a microbatch. The extra
        microbatch of an audit is yielded if `Audit.takes` is true, and not in a replay.
        """
        audit = self.audit
        if microbatch.audit:
            return audit is not None and not self.is_replaying and audit.takes(microbatch)
        if microbatch.size or torch.is_grad_enabled():
            return True
        return any(model.buffers.are_trained or model.is_split for model in self._buffered)

    @property
    def is_audited(self) -> bool:
        """Whether the loop's body computes an audit's extra microbatch now, without effect on the run."""
        return bool(self._active) and self._active[0].audit

    @property
    def record(self) -> Record | None:
        """Loss and gradients of the current microbatch, if an audit compares them (else `None`)."""
        return None if self.audit is None else self.audit.record

    def microbatch_begins(self, microbatch: Microbatch, data: Any) -> None:
        """Record that a microbatch begins, before its `data` is yielded to the loop's body."""
        self.first_error.check()
        self._active.append(microbatch)
        if len(self._active) == 1:  # else this is an evaluation inside of a microbatch
            for model in self._buffered:
                model.microbatch_begins(microbatch)
            if self.audit is not None:
                self.audit.begins(microbatch, data)
        for call in () if microbatch.audit else self._on_microbatch:
            call(microbatch)
        self.generators.microbatch_begins(microbatch)

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """Record that a microbatch ends; `left`: whether by the script's `break` or an exception."""
        if self.closed:
            return  # an exception ended the run, and the generator of the loop is deleted only now
        if not left:
            self.first_error.check()
        if len(self._active) == 1:
            for model in self._buffered:
                model.microbatch_ends(microbatch, left=left)
        self._active.pop()
        if self.audit is not None and not self._active:
            self.audit.ends(microbatch, self.steps + 1, left=left)
        if self._updated and microbatch.last:
            self._count_update(microbatch)

    def batch_ends(self, start: Start) -> bool:
        """Record that a global batch ends; return whether its loop is over.

        True if a resumed run repeats only the last batch of a loop that ended before the restart.
        """
        loop: LoopEvent = start.loop
        passed = self.generators.passed
        if self._updated and passed is not None and not self._active:
            self._count_update(passed)
        if start.again is not None and self.progress.is_replaying:
            self.progress.repeated(loop)
            self.arrive()
            return start.is_over
        if len(self._loops) != 1 or self._active:
            return False  # the batch of a loop around this one is not finished
        loop.batches, loop.steps = loop.batches + 1, self.progress.steps
        if self._fresh:
            self.progress.trained(loop)
            self._trains = True
            self.point()
        elif self.evaluations is not None and not (self._trains or self.is_replaying):
            self.evaluations.batch_ends(loop.batches)
        return False

    def _count_update(self, microbatch: Microbatch) -> None:
        progress, self._updated = self.progress, False
        progress.steps += 1
        if progress.is_replaying:
            return
        self._fresh = True
        for call in self._on_step:
            call(progress.steps, microbatch)

    def loop_ends(self, start: Start, step: int, *, early: bool) -> None:
        """End the loop that `start` began, and call the listeners' `loop_ends`.

        `step`: number of batches that the loop had. If the script left the loop early, as by `break`, it is
        the number of the batch in which that happened, and `early` is true.
        """
        if self.closed:
            return
        ended: LoopEvent = start.loop
        self.generators.start(keys.BETWEEN, *ended.key, -1, 0)
        self._loops = [loop for loop in self._loops if loop is not ended]
        if not self._loops:
            trained = self._fresh or self._trains
            self._fresh = self._trains = False
            if trained and not self.is_replaying:
                ended.complete, ended.steps = True, self.steps
                self.progress.trained(ended)
            if not early:
                self.average_models()
            if self.evaluations is not None and not self.is_replaying:
                self.evaluations.loop_ends(trained=trained)
        if start.again is not None and self.progress.is_replaying:
            self.progress.repeated(ended)  # the script left the loop inside of the replayed batch
        self.progress.loop_ends(ended, early=early)
        self.arrive()
        for listener in self._listeners:
            listener.loop_ends(start.key, step, early=early)

    def saw_loss(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        """Note that a backward pass computes gradients of `loss`: the loop counts as training.

        If the run has one replica and no other loop is open, the loss is recorded too. A replay instead
        sets `loss` to its recorded value, since the script may read it after the loop.
        """
        if self.evaluations is not None:
            self.evaluations.learns()
        if self.audit is not None and microbatch.first:
            self.audit.trains(microbatch)
        # With one replica a script may read its losses after the loop. So replay sets the losses of a batch
        # that it computes again, with other parameters, to their recorded values.
        if self._replicas == len(self._loops) == 1:
            if not self.progress.is_replaying:
                self._loops[0].losses.append(loss.detach())
            elif self._losses:
                loss.detach().fill_(self._losses.pop(0))
