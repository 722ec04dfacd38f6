"""`Loop`: position of a run in its epochs, loops over loaders, microbatches and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.engine.data.microbatch import Batching, Microbatch, Start
from lockstep.engine.data.randomness import undisturbed
from lockstep.engine.data.sources import Audited, no_audit
from lockstep.engine.layout import keys
from lockstep.engine.recovery.coordination import Alone
from lockstep.engine.recovery.evaluations import Evaluations
from lockstep.engine.recovery.losses import Losses
from lockstep.engine.recovery.progress import Progress
from lockstep.engine.recovery.state import State
from lockstep.engine.strategies.untrained_module import UntrainedModule
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.audit import Audit
from lockstep.engine.training.audit_record import Record
from lockstep.engine.training.first_error import FirstError
from lockstep.engine.training.generator_keys import GeneratorKeys
from lockstep.engine.training.listeners import Listener, overriding
from lockstep.errors import StepError
from lockstep.state.checkpoint.position import LoopEvent, Position

#: Gives everything its saved state; told whether everything is expected to be there.
Restore = Callable[[bool], None]


class Loop:
    """The state machine behind `for epoch in run.epochs(…): for batch in loader: …`.

    Args:
        seed: the run's seed.
        replicas: number of replicas in all.
        models: the models that the run holds; the run adds to it.
        listeners: get callbacks on steps and loops.

    Attributes:
        progress: the way through the script.
        epoch: number of the running epoch.
        epochs: how many epochs were asked for.
        phases: how many times epochs were asked for.
        resumed: after which step the run continues; 0 where it begins.
        generators: start the random generators at keys.
        first_error: the error that ends the run, once there is one.
        evaluations: ends the run in loops that only evaluate, where it is asked to.
        followed: modules whose buffers are replica 0's, too; the run adds to them.
    """

    def __init__(
        self, seed: int, replicas: int, models: Sequence[WrappedModel], listeners: list[Listener]
    ) -> None:
        self.generators = GeneratorKeys(seed)
        self.pass_ends = self.generators.pass_ends
        self._replicas = replicas
        self._models = models
        self.first_error = FirstError(replicas)
        #: A loop, a pass or `run.epochs` has raised an error to the script, which may catch it.
        self.fails = self.first_error.keep
        self.evaluations = Evaluations(State(), Alone(), None, _nothing)
        self.followed: Sequence[UntrainedModule] = ()
        self._listeners = listeners
        self._tells_microbatch = overriding(listeners, "microbatch_begins")
        self._tells_step = overriding(listeners, "step_ends")
        self._active: list[Microbatch] = []
        self.progress = Progress()
        self._loops: list[LoopEvent] = []  # those that we are in
        self._losses = Losses()
        self._fresh = False  # whether there was an update since the last point
        self._restore: Restore | None = None
        self._updated = self._has_met = self._has_approached = False
        self._trains = False  # whether the outermost loop has updated parameters
        self.audit: Audit | None = None
        self.closed = False
        self.warn: Callable[[str], None] = _nothing
        self.epoch = self.epochs = self.phases = 0
        self.points = 0
        self.resumed = 0
        self.at_point: Callable[[], None] = _nothing
        self.at_epoch: Callable[[], None] = _nothing
        self.at_arrival: Callable[[], None] = _nothing
        #: Notes what metrics under way have seen; all ranks call it together.
        self.note_partial: Callable[[], None] = _nothing

    # --- points: places between batches and between epochs, where the state is whole -------------

    @property
    def steps(self) -> int:
        """How many steps are done; during replay as many as were when the script was here."""
        return self.progress.steps

    @property
    def updates(self) -> int:
        """How many times the parameters have been updated, with the step that is under way."""
        return self.progress.steps + self._updated

    @property
    def position(self) -> Position:
        """Where the run stands at this point."""
        return self.progress.position(self.points)

    def resume(self, position: Position, restore: Restore) -> None:
        """Continue at `position`: pass over what was done before it.

        Args:
            position: where the run was.
            restore: gives models and all others their state. It is called as soon as the script comes to
                its first loop, which may only evaluate, and again, for the whole, at `position`.
        """
        self.progress.set_out(position)
        self.points, self.resumed = position.points, position.steps
        self._restore = restore

    @property
    def is_on_the_way(self) -> bool:
        """Whether the script has not come to where its state was saved."""
        return self.progress.is_on_the_way

    @property
    def is_entered_again(self) -> bool:
        """Whether the script does what it has done before, in an epoch, a loop or a metric."""
        return self.is_on_the_way and self.progress.depth > 0

    def approach(self) -> None:
        """The script comes to its first loop, epoch or metric: from here on it may use the state."""
        if self._restore is not None and not self._has_approached:
            self._has_approached = True
            with undisturbed():
                self._restore(False)
            self.arrive()

    def arrive(self) -> None:
        """Load the state, if the script has come to where that was saved."""
        if not self.progress.is_there:
            return
        assert self._restore is not None, "there was a position to come to"
        # Before the run has arrived: an error here may be lost with a loop that was left, and comes again.
        with undisturbed():
            self._restore(True)
        position, self._restore = self.progress.arrive(), None
        self.evaluations.trained()
        self._fresh = self._updated = False
        self.points = position.points
        self.at_arrival()
        if self.progress.evaluated_again:
            loaders = ", ".join(map(str, sorted(set(self.progress.evaluated_again))))
            self.warn(
                f"lockstep: warning: loops over loader {loaders} that only evaluate have run again, with "
                f"the parameters of step {self.steps}; run.mean, run.sum and run.gather return what they "
                "returned before"
            )

    @property
    def iterations(self) -> dict[Any, int]:
        """Epoch and batches that the script is in: their numbers, by phase and loop."""
        batches: dict[Any, int] = {loop.key: loop.last for loop in self._loops}
        return batches | ({("phase", self.phases): self.epoch} if self.progress.is_in_epoch else {})

    @property
    def is_in_loop(self) -> bool:
        """Whether the script is in a loop over a loader."""
        return bool(self._loops)

    def passes_save(self) -> bool:
        """The script calls `run.save` outside of loops; return whether that has been done before."""
        self.approach()
        done = self.progress.passes_save()
        self.arrive()
        return done

    def point(self) -> None:
        """The state is whole here."""
        if self.progress.is_on_the_way:
            return
        # A loop that was left in the middle of a batch has not synchronized the ranks' buffers.
        self.finish_buffers()
        # Models count their own steps until an average: where one has, all do, or there might never be a
        # batch after which all are whole.
        if self._has_met or not self._loops:
            self.come_together(waits=not self._loops)
        for model in self._models:
            if not model.is_synchronized:
                return  # ranks that go ways of their own for some steps will be one again
        self._fresh = False
        self.points += 1
        self.at_point()

    @property
    def batch_index(self) -> int:
        """Number of the innermost loop's current global batch."""
        return (
            self._loops[-1].last if self._loops else self.require_microbatch("run.batch_index").step
        )

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch that the innermost loop's body is working on, if any."""
        return self._active[-1] if self._active else None

    def require_microbatch(self, call: str) -> Microbatch:
        """Return the current microbatch.

        Raises:
            StepError: outside of a loop over a loader.
        """
        if not self._active:
            raise StepError(
                f"{call} was called outside of a loop over a loader; "
                "expected to be inside, since the loader says which batch it is, and what it weighs",
                hint="make the loader with run.loader(…) and iterate over it; itertools.cycle does so "
                "once, and then gives what it has kept: loop over the loader inside `while …:`",
            )
        return self._active[-1]

    def require_common_point(self, call: str, *, of_models: bool = True) -> None:
        """Refuse a collective call where ranks may host different numbers of replicas.

        Args:
            call: its name.
            of_models: whether it needs the same models on all ranks: then they become the same here.

        Raises:
            StepError: inside a microbatch, when there are several replicas.
        """
        self.first_error.check()
        if self._active and self._replicas > 1:
            raise StepError(
                f"{call} was called inside a microbatch; with {self._replicas} replicas, a rank that "
                "hosts several would call it more often than one that hosts one",
                hint="call it after the loop, or between the batches of "
                "`for batch in run.batches(loader): …`",
            )
        self.settle()
        if of_models:
            self.come_together()

    def settle(self) -> None:
        """Let ranks agree on what a `break` has left open; all of them come here together."""
        self.first_error.check()
        self.finish_buffers()

    def finish_buffers(self) -> None:
        """Let all ranks take replica 0's buffers now; all of them come here together."""
        for one in self._buffered:
            one.finish_buffers()

    @property
    def _buffered(self) -> list[WrappedModel | UntrainedModule]:
        return [*self._models, *self.followed]

    def come_together(self, *, waits: bool = True) -> None:
        """Let ranks that have trained by themselves be one model again, and wait for late updates."""
        if not self._active:
            self._has_met = False
            for model in self._models:
                model.synchronize()
                if waits:
                    model.show_newest()

    def acts_now(self) -> bool:
        """Whether an update asked for now is due now: on the last microbatch of a global batch."""
        return not self._active or self._active[-1].last

    def step_is_read(self) -> None:
        """The script asks for the number of the step, or of the batch: it may leave a loop by that."""
        if self.audit is not None:
            self.audit.step_was_read = True

    def updated(self) -> None:
        """An optimizer is about to update its parameters."""
        self._updated = True

    def stepped(self, model: WrappedModel) -> None:
        """A model of independent ranks was updated: if it is whole now, ranks have just averaged."""
        self._has_met |= model.is_synchronized

    def loop_begins(self, loader: int, batching: Callable[[], Batching]) -> Start:
        """Return where a loop over `loader` that begins now starts.

        Raises:
            StepError: inside a microbatch, with several replicas.
            RunDirectoryError: if the run was in the middle of this loop, which now makes other batches.
        """
        self.require_common_point("iterating over a loader")
        self.approach()
        start = self.progress.loop_begins(loader, batching())
        loop: LoopEvent = start.loop
        self.arrive()
        if not self._loops:
            self._trains = start.is_over or start.again is not None or start.batch > 0
            self._losses.begins(loop, again=start.again is not None)
            if not (self._trains or self.is_on_the_way):
                self.evaluations.begins(loop, self.progress.counters())
        self._loops.append(loop)
        for listener in self._listeners:
            listener.loop_begins(loader, start.epoch, start.round)
        return start

    def batch_begins(self, start: Start, step: int, *, shown: bool) -> None:
        """The script is about to see a global batch; where it is shown, what it draws is its own."""
        loop: LoopEvent = start.loop
        if shown:
            self.generators.start(keys.BETWEEN, *loop.key, step, -1)
        if start.again is None or not self.progress.is_on_the_way:  # else it is computed again
            loop.last, loop.before = step, self.progress.steps
            loop.losses.clear()
            loop.events.clear()

    def audit_plan(self, start: Start) -> Audited:
        """Return what says which replica is computed once more in a global batch of a loop."""
        if self.audit is None:
            return no_audit
        loop: LoopEvent = start.loop
        steps = self.progress.steps if start.again is None else loop.steps
        return self.audit.plan(start, self.phases, steps)

    def takes(self, microbatch: Microbatch) -> bool:
        """Whether the loop's body sees a microbatch now.

        Replicas without a sample take part in sums of gradients, buffers or parts of a model.
        """
        if microbatch.audit:
            return (
                self.audit is not None and not self.is_on_the_way and self.audit.takes(microbatch)
            )
        return bool(microbatch.size) or self._needs_stand_ins()

    def _needs_stand_ins(self) -> bool:
        return torch.is_grad_enabled() or any(
            model.trains_buffers or model.is_split for model in self._buffered
        )

    @property
    def is_audited(self) -> bool:
        """Whether the loop's body computes a microbatch once more, which is thrown away."""
        return bool(self._active) and self._active[0].audit

    @property
    def record(self) -> Record | None:
        """What the microbatch computes is recorded here, where an audit compares it."""
        return None if self.audit is None else self.audit.record

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """The loop's body is about to see this microbatch."""
        self.first_error.check()
        self._active.append(microbatch)
        if len(self._active) == 1:  # else it is an evaluation inside of a microbatch
            for model in self._buffered:
                model.microbatch_begins(microbatch)
            if self.audit is not None:
                self.audit.begins(microbatch)
        for tell in () if microbatch.audit else self._tells_microbatch:
            tell(microbatch)
        self.generators.microbatch_begins(microbatch)

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """The loop's body is done with this microbatch, or has left it."""
        if self.closed:
            return  # an exception ended the run; its loops are only now collected
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
        """The script is done with a global batch of a loop; return whether that was the last."""
        loop: LoopEvent = start.loop
        passed = self.generators.passed
        if self._updated and passed is not None and not self._active:
            self._count_update(passed)
        if start.again is not None and self.progress.is_on_the_way:
            self.progress.repeated(loop)
            self.arrive()
            return start.is_over
        if len(self._loops) != 1 or self._active:
            return False  # inside of another loop: its batch is not done
        loop.batches, loop.steps = loop.batches + 1, self.progress.steps
        if self._fresh:
            self.progress.trained(loop)
            self._trains = True
            self.point()
        elif not (self._trains or self.is_on_the_way):
            self.evaluations.batch_ends(loop.batches)
        return False

    def _count_update(self, microbatch: Microbatch) -> None:
        progress, self._updated = self.progress, False
        progress.steps += 1
        if progress.is_on_the_way:
            return
        self._fresh = True
        for tell in self._tells_step:
            tell(progress.steps, microbatch)

    def loop_ends(self, start: Start, step: int, *, early: bool) -> None:
        """The loop is over in global batch `step`: early by `break`, or after the last one."""
        if self.closed:
            return
        ended: LoopEvent = start.loop
        self.generators.start(keys.BETWEEN, *ended.key, -1, 0)
        self._loops = [loop for loop in self._loops if loop is not ended]
        if not self._loops:
            self._end_outermost(ended, early=early)
        if start.again is not None and self.progress.is_on_the_way:
            self.progress.repeated(ended)  # it was left in the middle
        self.progress.loop_ends(ended, early=early)
        self.arrive()
        for listener in self._listeners:
            listener.loop_ends(*ended.key, step, early=early)

    def _end_outermost(self, ended: LoopEvent, *, early: bool) -> None:
        trained = self._fresh or self._trains
        self._fresh = self._trains = False
        if trained and not self.is_on_the_way:
            ended.complete, ended.steps = True, self.steps
            self.progress.trained(ended)
        if not early:
            self.come_together()
        if not self.is_on_the_way:
            self.evaluations.loop_ends(trained=trained)

    def saw_loss(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        """Gradients of a loss have been computed in the innermost loop: it does not only evaluate."""
        self.evaluations.learns()
        if self.audit is not None:
            self.audit.trains(microbatch)
        if self._replicas == len(self._loops) == 1:
            self._losses.saw(loss, self._loops[0], is_on_the_way=self.is_on_the_way)

    def close(self) -> None:
        """The run is over: what loops say from here on is ignored."""
        self.closed = True


def _nothing(*_: object) -> None:
    """What happens at a point of a loop without a run."""
