"""Progress of a run through its script: calls that a resumed run repeats up to its saved position.

A script that is started again runs from its top. Until it comes to the position, whatever it reaches is
there already, and must look to the script as it did:

- of a phase that is over, the last epoch is entered again;
- of a loop that is over, the last batch is computed again, so that the names which the loop's body assigns
  are there; the state that follows from it is that of the position, which is loaded afterwards;
- a metric returns the value that it had, and computes nothing;
- `run.save` does nothing.

Loops that only evaluate, outside of metrics, run again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.engine.data.microbatch import Batching, Start
from lockstep.errors import CheckpointError, RunDirectoryError, StepError
from lockstep.state.checkpoint.position import (
    Counters,
    Event,
    LoopEvent,
    MetricEvent,
    PhaseEvent,
    Position,
    SaveEvent,
)

EventT = TypeVar("EventT", PhaseEvent, MetricEvent, SaveEvent)

#: Of how many of the first and of the last loops that are over a batch is computed again: a script that
#: makes its epochs by itself may have thousands of them.
_AGAIN = 16


@dataclass(slots=True)
class _Level:
    """Events that a script reaches within a phase, a metric or a loop's batch, or outside of all.

    Attributes:
        events: those that it has reached.
        ahead: during replay, those that it is to reach; `None` inside of what was not recorded.
        of: what it is the inside of.
        waits: whether the position lies behind what is entered again here.
    """

    events: list[Event]
    ahead: list[Event] | None = field(default_factory=list)
    of: Event | None = None
    waits: bool = False


class Progress:
    """Counts phases, epochs, loops and metrics, and passes over what is done.

    Attributes:
        steps: updates until here.
        stretch: number of the stretch: another one for every epoch and every phase, part of all keys.
        is_on_the_way: whether the target has not been reached yet.
        evaluated_again: loaders of loops that were gone through again, since they only evaluate.
    """

    def __init__(self) -> None:
        self.steps = self.stretch = 0
        self.is_on_the_way = False
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._loaders = 0
        self._levels = [_Level([])]
        self._target: Position | None = None
        self._last: Event | None = None  # that leads to the target
        self.evaluated_again: list[int] = []

    # --- where it is -----------------------------------------------------------------------------

    def position(self, points: int) -> Position:
        """Return where the run stands, having passed so many points."""
        return Position(points=points, counters=self.counters(), events=self._levels[0].events)

    def counters(self) -> Counters:
        """Return what counts on."""
        return Counters(
            self.steps, self.stretch, self._loaders, tuple(sorted(self._rounds.items()))
        )

    def _set(self, counters: Counters) -> None:
        self.steps, self.stretch, self._loaders = counters.steps, counters.stretch, counters.loaders
        self._rounds.clear()
        self._rounds.update(counters.rounds)

    def _begin_stretch(self) -> None:
        if self._rounds:
            self.stretch += 1
            self._rounds.clear()

    @property
    def open_metrics(self) -> list[MetricEvent]:
        """The calls of metrics that the script is in, the outermost first."""
        return [level.of for level in self._levels if isinstance(level.of, MetricEvent)]

    @property
    def depth(self) -> int:
        """How many phases, metrics and loops the script is in."""
        return len(self._levels) - 1

    # --- phases and epochs -----------------------------------------------------------------------

    def phase_begins(self, count: int) -> range:
        """Return the epochs of a phase of `count` that are still to be run, or entered again.

        Raises:
            StepError: inside of a metric.
        """
        self._refuse_in_metric()
        event = self._expect(PhaseEvent)
        if event is None:
            event = PhaseEvent(begin=self.counters())
            self._enter(event)
            return range(count)
        return self._return_to(event, count)

    def _refuse_in_metric(self) -> None:
        metrics = self.open_metrics
        if metrics and not self.is_in_epoch:
            raise StepError(
                f"run.epochs was called by the items of {metrics[-1].call}; expected them to come from "
                "loops over loaders",
                hint=f"call {metrics[-1].call} in each epoch",
            )

    def _return_to(self, event: PhaseEvent, count: int) -> range:
        last = event.epoch
        if last is None:
            self._enter(event, waits=event.complete)
            return range(0)
        if event.ended and not event.complete and last + 1 < count:
            self._set(event.after)
            event.events = []
            self._enter(event)
            return range(last + 1, count)
        ahead, event.events = event.events, []
        self._set(event.begin)
        self._enter(event, ahead, waits=event.ended or event.complete)
        return range(last, last + 1 if event.ended or event.complete else count)

    @property
    def _phase(self) -> PhaseEvent:
        return next(level.of for level in self._levels[::-1] if isinstance(level.of, PhaseEvent))

    def epoch_begins(self, epoch: int) -> None:
        """An epoch begins."""
        phase = self._phase
        level = self._levels[self._level_of(phase)]
        if self._target is not None and (level.ahead or level.waits or phase.epoch == epoch):
            return  # entered again: it began as it did
        self._begin_stretch()
        phase.epoch, phase.begin, phase.ended = epoch, self.counters(), False
        phase.events = level.events = []

    def epoch_ends(self) -> None:
        """The script is done with an epoch.

        Raises:
            CheckpointError: if it should have reached another event there.
        """
        phase = self._phase
        level = self._levels[self._level_of(phase)]
        if self._target is not None:
            self._skip(level)
            if level.ahead or not level.waits:
                raise _elsewhere(f"at the end of epoch {phase.epoch}")
            self._set(phase.after)
            level.waits = phase.complete
            return
        self._begin_stretch()
        phase.ended, phase.after = True, self.counters()

    def phase_ends(self) -> None:
        """All epochs of a phase are done, or the script has left them."""
        phase = self._phase
        self._leave(phase)
        if self._target is not None:
            self._set(phase.after)
            return
        self._begin_stretch()
        phase.complete, phase.after = True, self.counters()

    def phase_left(self) -> None:
        """The script has left the epochs by `break`, or by an exception, which looks the same here."""
        if self._target is None:
            self.epoch_ends()
        elif not self._phase.complete:
            return  # not as before: what comes next says so
        self.phase_ends()

    # --- loops -----------------------------------------------------------------------------------

    def new_loader(self) -> int:
        """Return the number of a loader that the script makes now, part of its loops' keys."""
        number, self._loaders = self._loaders, self._loaders + 1
        return number

    def loop_begins(self, loader: int, batching: Batching) -> Start:
        """Return where a loop over `loader` that begins now starts, with its event.

        Raises:
            RunDirectoryError: if the run was in the middle of it, when it had another `batching`.
        """
        epoch, round_ = self.stretch, self._rounds[loader]
        self._rounds[loader] += 1
        done, many = self._expect_loop((loader, epoch, round_))
        if done is None:
            event = LoopEvent(loader=loader, stretch=epoch, round=round_, batching=batching)
            self._levels.append(_Level(event.events, None if self._target else [], event))
            return Start(epoch=epoch, round=round_, loop=event)
        _check_the_same(done, batching, self._epoch)
        again, over = None if many else _again(done), done.complete
        start = Start(
            epoch=epoch, round=round_, batch=done.batches, again=again, is_over=over, loop=done
        )
        if again is None:
            self.steps = done.steps
            self._enter(done)
            if not done.batches and not over:  # it only evaluates
                self._around.events.remove(done)
        else:
            ahead, done.events = done.events, []
            self.steps = done.before
            self._enter(done, ahead, waits=True)
        return start

    def _expect_loop(self, key: tuple[int, int, int]) -> tuple[LoopEvent | None, bool]:
        """Return the loop that was there, and whether it is one of many in the middle."""
        level = self._around
        ahead = level.ahead or []
        loop = next((event for event in ahead if not self._may_be_missing(event)), None)
        if self._target is None or not isinstance(loop, LoopEvent) or loop.key != key:
            return None, False
        self._skip(level)
        ahead.remove(loop)
        passed = sum(isinstance(event, LoopEvent) for event in level.events)
        coming = sum(isinstance(event, LoopEvent) for event in ahead)
        return loop, loop.complete and passed >= _AGAIN and coming >= _AGAIN

    @property
    def is_in_epoch(self) -> bool:
        """Whether the script is in an epoch."""
        return any(isinstance(level.of, PhaseEvent) for level in self._levels)

    @property
    def _epoch(self) -> int | None:
        return self._phase.epoch if self.is_in_epoch else None

    def trained(self, loop: LoopEvent) -> None:
        """A loop has updated parameters: from here on it is part of the way."""
        events = self._around.events
        if not events or events[-1] is not loop:
            events.append(loop)

    def repeated(self, loop: LoopEvent) -> None:
        """The last batch of a loop has been computed again."""
        level = self._levels[self._level_of(loop)]
        level.waits, level.ahead = False, []
        self.steps = loop.steps

    def loop_ends(self, loop: LoopEvent, *, early: bool) -> None:
        """A loop is over."""
        if (
            self._target is not None
            and self._levels[self._level_of(loop)].ahead is None
            and not early
        ):
            self.evaluated_again.append(loop.loader)
        self._leave(loop)

    # --- metrics and saves -----------------------------------------------------------------------

    def metric_begins(self, call: str) -> MetricEvent:
        """Return a call of a metric that begins now; during replay with the value that it had."""
        event = self._expect(MetricEvent, call)
        if event is None:
            event = MetricEvent(call=call, after=self.counters())
            ahead: list[Event] | None = None if self._target else []
            if ahead is not None:
                self._levels[-1].events.append(event)
            self._levels.append(_Level(event.events, ahead, event))
        elif event.done:
            self._levels[-1].events.append(event)
            self._set(event.after)
        else:
            ahead, event.events = event.events, []
            self._enter(event, ahead)
        return event

    def metric_ends(self, event: MetricEvent, value: Any, key: int | None) -> None:
        """A call of a metric returns `value`: the events of its items are not needed any more."""
        self._leave(event)
        event.done, event.value, event.key, event.after = True, value, key, self.counters()
        event.events = []

    def metric_left(self, event: MetricEvent) -> None:
        """A call of a metric has ended with an exception."""
        self._leave(event)
        events = self._levels[-1].events
        if events and events[-1] is event:
            events.pop()

    def passes_save(self) -> bool:
        """The script calls `run.save` outside of loops; return whether that is to do nothing."""
        event = self._expect(SaveEvent)
        if event is not None or self._target is None:
            self._levels[-1].events.append(event or SaveEvent())
        return event is not None or self._target is not None

    # --- levels ----------------------------------------------------------------------------------

    def _expect(self, kind: type[EventT], call: str = "") -> EventT | None:
        """Return the event that the run has reached here before.

        A script may decide whether it saves or evaluates, by what it does not have during replay: the
        best value until then, say. So these calls may be missing, and others may come, which return `None`
        as they do off the way and inside of evaluations.

        Raises:
            CheckpointError: if the run has reached another event, without which it cannot continue.
        """
        level = self._around if kind is PhaseEvent else self._levels[-1]
        if self._target is None or level.ahead is None:
            return None
        for event in level.ahead:
            if isinstance(event, kind) and getattr(event, "call", "") == call:
                del level.ahead[: level.ahead.index(event) + 1]
                return event
            if not self._may_be_missing(event):
                break
        if kind is PhaseEvent:
            raise _elsewhere("at run.epochs")
        return None

    def _may_be_missing(self, event: Event) -> bool:
        is_short = isinstance(event, SaveEvent) or (isinstance(event, MetricEvent) and event.done)
        return is_short and event is not self._last

    def _skip(self, level: _Level) -> None:
        """Leave out calls that are missing this time, up to something that may not be."""
        while level.ahead and self._may_be_missing(level.ahead[0]):
            level.ahead.pop(0)

    def _enter(
        self, event: Event, ahead: list[Event] | None = None, *, waits: bool = False
    ) -> None:
        level = self._levels[-1] if isinstance(event, MetricEvent) else self._around
        level.events.append(event)
        self._levels.append(_Level(event.events, ahead or [], event, waits))

    @property
    def _around(self) -> _Level:
        """The innermost level that is no loop's: iterators of loops that were left may be alive."""
        place = -1
        while isinstance(self._levels[place].of, LoopEvent):
            place -= 1
        return self._levels[place]

    def _leave(self, event: Event) -> None:
        """Leave the inside of `event`: not always the innermost, where loops are zipped."""
        del self._levels[self._level_of(event)]

    def _level_of(self, event: Event) -> int:
        return next(number for number, level in enumerate(self._levels) if level.of is event)

    # --- replay ----------------------------------------------------------------------------------

    def set_out(self, target: Position) -> None:
        """The run was at `target` before: from here on, pass over what was done until then."""
        self._target, self.is_on_the_way = target, True
        self._levels = [_Level([], list(target.events))]
        events = target.events
        while events:
            self._last = last = events[-1]
            events = last.events if _is_open(last) else ()

    @property
    def is_entered_again(self) -> bool:
        """Whether the script has been before where it is, during replay, and its results are known."""
        return self._target is not None and self._levels[-1].ahead is not None

    def check_arrived(self) -> None:
        """The script is at its end.

        Raises:
            CheckpointError: if it has not come to its target.
        """
        if self._target is not None:
            raise _elsewhere("at its end")

    @property
    def is_there(self) -> bool:
        """Whether the run has come to its target, and is to be told by `arrive`."""
        return self._target is not None and not any(
            level.waits or level.ahead for level in self._levels
        )

    def arrive(self) -> Position:
        """Return the target, which the run has reached: from here on nothing is passed over."""
        target, self._target, self.is_on_the_way = self._target, None, False
        assert target is not None, "there was a position to come to"
        self._set(target.counters)
        return target


def _again(loop: LoopEvent) -> int | None:
    """Return which batch of a loop that was there is to be computed again; `None` where others follow."""
    length = loop.batching.batches
    if loop.complete or length is None or loop.batches >= length:
        return loop.last
    return None


def _check_the_same(done: LoopEvent, batching: Batching, epoch: int | None) -> None:
    """Refuse to continue in the middle of a loop whose batches are others now; one that is over may be."""
    differences = [] if done.complete else done.batching.differences(batching)
    if differences:
        where = "" if epoch is None else f" of epoch {epoch}"
        raise RunDirectoryError(
            f"the run stopped after batch {done.batches} of a loop{where} over loader {done.loader}, "
            "which makes other batches now: " + "; ".join(differences),
            hint="continue with the batch size and the data that it began with; seed what draws them "
            "before the run, and draw by registered values that the loop leaves alone; --fresh begins anew",
        )


def _is_open(event: Event) -> bool:
    """Whether a position whose last event is this one is inside of it, at an event there."""
    if isinstance(event, PhaseEvent):
        return not (event.ended or event.complete)
    return isinstance(event, MetricEvent) and not event.done


def _elsewhere(where: str) -> CheckpointError:
    return CheckpointError(
        f"the script does not come to where its state was saved: it is {where} without what was there "
        "before",
        hint="a run continues with the script and the data it began with; whether loops, epochs and saves "
        "come must not follow from variables of the script that are not registered; --fresh begins anew",
    )
