"""`Progress`: the position of a run in its script, and the replay of a resumed run up to that position.

A resumed run executes its script from the top. Until the script reaches the saved position, replay makes
the methods of the run return the results that they returned before the restart:

- A call of `run.epochs` whose epochs are all completed yields only its last epoch.
- A completed loop over a loader computes only its last batch again, so that the loop's body assigns its
  variables. The saved state is loaded afterwards.
- `run.mean`, `run.sum` and `run.gather` (metrics) return their recorded values; `run.save` saves nothing.
- A loop that only evaluates, outside of metrics, runs again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.engine.data.microbatch import Batching, LoopKey, Start
from lockstep.errors import CheckpointError, RunDirectoryError, StepError
from lockstep.state.checkpoint.position import (
    Counters,
    Event,
    LoopEvent,
    MetricEvent,
    PhaseEvent,
    SavedPosition,
    SaveEvent,
)

EventT = TypeVar("EventT", PhaseEvent, LoopEvent, MetricEvent, SaveEvent)

#: Number of the first, and of the last, finished loops of which replay computes a batch again. A script
#: that counts its epochs without `run.epochs` may have thousands of loops.
_AGAIN = 16


@dataclass(slots=True, eq=False)
class _Level:
    """Events of a script that are directly inside the same other event, or inside none (the top level).

    An event is a call of `run.epochs`, a loop over a loader, a metric such as `run.mean`, or `run.save`.
    """

    events: list[Event]  # events that the script has reached
    #: during replay, recorded events not reached yet; `None` inside of an event without a record
    ahead: list[Event] | None = field(default_factory=list)
    of: Event | None = None  # the event around these events; `None` at the top level
    waits: bool = False  # whether `of` is replayed and the saved position lies behind its end


class Progress:
    """Counts steps, epochs and loops of a run; decides which calls of a resumed script are repeats.

    Attributes:
        stretch: number that differs for every epoch and call of `run.epochs`; random seeds depend
            on it.
        is_replaying: whether a resumed run has not reached the saved position yet.
        evaluated_again: numbers of the loaders whose loops only evaluate and ran again during
            replay.
    """

    def __init__(self) -> None:
        self.steps = self.stretch = 0
        self.is_replaying = False
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._loaders = 0
        self._levels = [_Level([])]
        self._target: SavedPosition | None = None
        self._last: Event | None = None  # the last recorded event before the target
        self.evaluated_again: list[int] = []

    # --- the position ----------------------------------------------------------------------------

    def position(self, points: int) -> SavedPosition:
        """Return the run's position in the script; `points`: batches and epochs completed so far."""
        return SavedPosition(points=points, counters=self.counters(), events=self._levels[0].events)

    def counters(self) -> Counters:
        """Return the counts of steps, epochs and `run.epochs` calls, loaders, and loops per loader."""
        rounds = tuple(sorted(self._rounds.items()))
        return Counters(self.steps, self.stretch, self._loaders, rounds)

    def _set(self, counters: Counters) -> None:
        self.steps, self.stretch, self._loaders = counters.steps, counters.stretch, counters.loaders
        self._rounds = defaultdict(int, counters.rounds)

    def _begin_stretch(self) -> None:
        if self._rounds:
            self.stretch += 1
            self._rounds.clear()

    @property
    def open_metrics(self) -> list[MetricEvent]:
        """Calls of metrics, such as `run.mean`, that have begun and not returned, the outermost first."""
        return [level.of for level in self._levels if isinstance(level.of, MetricEvent)]

    @property
    def depth(self) -> int:
        """Number of calls of `run.epochs`, metrics and loops that have begun and not ended."""
        return len(self._levels) - 1

    # --- phases and epochs -----------------------------------------------------------------------

    def phase_begins(self, count: int) -> range:
        """Record that a call of `run.epochs` begins; return the numbers of the epochs to run or repeat.

        `count`: the number of epochs that the script wants.

        Raises:
            StepError: if the call is made inside of a metric, such as `run.mean`, that is in no epoch.
        """
        metrics = self.open_metrics
        if metrics and not self.is_in_epoch:
            raise StepError(
                f"run.epochs was called by the items of {metrics[-1].call}; expected them to come from "
                "loops over loaders",
                hint=f"call {metrics[-1].call} in each epoch",
            )
        event = self._expect(PhaseEvent)
        if event is None:
            self._enter(PhaseEvent(begin=self.counters()))
            return range(count)
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
        """Record that epoch number `epoch` of the current call of `run.epochs` begins."""
        phase = self._phase
        level = self._level_of(phase)
        if self._target is not None and (level.ahead or level.waits or phase.epoch == epoch):
            return  # a replayed epoch keeps its recorded beginning
        self._begin_stretch()
        phase.epoch, phase.begin, phase.ended = epoch, self.counters(), False
        phase.events = level.events = []

    def epoch_ends(self) -> None:
        """Record that the current epoch ends.

        Raises:
            CheckpointError: if a resumed run has not repeated all loops that this epoch had before.
        """
        phase = self._phase
        level = self._level_of(phase)
        if self._target is not None:
            if not (level.waits and all(map(self._may_be_missing, level.ahead or ()))):
                raise _elsewhere(f"at the end of epoch {phase.epoch}")
            self._set(phase.after)
            level.waits, level.ahead = phase.complete, []
            return
        self._begin_stretch()
        phase.ended, phase.after = True, self.counters()

    def phase_ends(self) -> None:
        """Record that a call of `run.epochs` ends, after its last epoch or by the script's `break`."""
        phase = self._phase
        self._levels.remove(self._level_of(phase))
        if self._target is not None:
            self._set(phase.after)
            return
        self._begin_stretch()
        phase.complete, phase.after = True, self.counters()

    def phase_left(self) -> None:
        """Record that the script left `run.epochs` within an epoch, by `break` or by an exception."""
        if self._target is None:
            self.epoch_ends()
        elif not self._phase.complete:
            return  # the recorded phase had not ended: the script's next call raises an error
        self.phase_ends()

    # --- loops -----------------------------------------------------------------------------------

    def new_loader(self) -> int:
        """Count one more loader; return its number, from which the random seeds of the loader follow."""
        number, self._loaders = self._loaders, self._loaders + 1
        return number

    def loop_begins(self, loader: int, batching: Batching) -> Start:
        """Record that a loop over loader number `loader` begins; return its key and first batch.

        The first batch is 0, except in a loop that a resumed run continues or repeats. `batching`: the
        loader's batch size, number of samples and order.

        Raises:
            RunDirectoryError: if the run stopped in the middle of the loop, with another `batching`.
        """
        key = LoopKey(loader, self.stretch, self._rounds[loader])
        self._rounds[loader] += 1
        done = self._expect(LoopEvent, key)
        if done is None:
            event = LoopEvent(loader=loader, stretch=key.epoch, round=key.round, batching=batching)
            self._levels.append(_Level(event.events, None if self._target else [], event))
            return Start(key=key, loop=event)
        over = done.complete
        if not over:
            self._check_batching(done, batching)
        length = done.batching.batches
        is_done = over or length is None or done.batches >= length
        again = done.last if is_done and not (over and self._is_among_many()) else None
        if again is None:
            self.steps = done.steps
            self._enter(done)
            if not done.batches and not over:  # the loop only evaluates
                self._around.events.remove(done)
        else:
            ahead, done.events = done.events, []
            self.steps = done.before
            self._enter(done, ahead, waits=True)
        return Start(key=key, batch=done.batches, again=again, is_over=over, loop=done)

    def _is_among_many(self) -> bool:
        """Return whether at least `_AGAIN` recorded loops come before the next loop, and as many after it.

        If so, replay does not compute the last batch of the next loop again.
        """
        around = (self._around.events, self._around.ahead or ())
        return all(sum(isinstance(e, LoopEvent) for e in events) >= _AGAIN for events in around)

    @property
    def is_in_epoch(self) -> bool:
        """Whether the script is inside a call of `run.epochs`."""
        return any(isinstance(level.of, PhaseEvent) for level in self._levels)

    def _check_batching(self, loop: LoopEvent, batching: Batching) -> None:
        """Raise `RunDirectoryError` if `batching` differs from the settings recorded in `loop`.

        `batching` has the loader's settings. The method is called if a resumed run is in the middle of
        `loop`.
        """
        differences = loop.batching.differences(batching)
        if differences:
            where = f" of epoch {self._phase.epoch}" if self.is_in_epoch else ""
            raise RunDirectoryError(
                f"the run stopped after batch {loop.batches} of a loop{where} over loader {loop.loader}, "
                "which makes other batches now: " + "; ".join(differences),
                hint="continue with the batch size and the data that it began with; seed what draws them "
                "before the run, and draw by registered values that the loop leaves alone; --fresh begins "
                "anew",
            )

    def trained(self, loop: LoopEvent) -> None:
        """Record that `loop` has updated parameters, so that saved positions contain this loop."""
        events = self._around.events
        if not events or events[-1] is not loop:
            events.append(loop)

    def repeated(self, loop: LoopEvent) -> None:
        """Record that replay has computed the last batch of `loop` again, after which the loop is over."""
        level = self._level_of(loop)
        level.waits, level.ahead = False, []
        self.steps = loop.steps

    def loop_ends(self, loop: LoopEvent, *, early: bool) -> None:
        """Record that `loop` ends.

        `loop` need not be the innermost loop, since a script may `zip` loaders. `early`: whether the script
        left the loop before its last batch, or a replay repeated only a part of the loop.
        """
        level = self._level_of(loop)
        if self._target is not None and level.ahead is None and not early:
            self.evaluated_again.append(loop.loader)
        self._levels.remove(level)

    # --- metrics and saves -----------------------------------------------------------------------

    def metric_begins(self, call: str) -> MetricEvent:
        """Record that a metric begins; return the event that records the value of the call.

        `call`: name of the metric, such as `mean`. If a resumed run repeats the call, the event has the
        value from before the restart.
        """
        event = self._expect(MetricEvent, call)
        if event is None:
            event = MetricEvent(call=call, after=self.counters())
            if self._target is None:
                self._levels[-1].events.append(event)
            self._levels.append(_Level(event.events, None if self._target else [], event))
        elif event.done:
            self._levels[-1].events.append(event)
            self._set(event.after)
        else:
            ahead, event.events = event.events, []
            self._enter(event, ahead)
        return event

    def metric_ends(self, event: MetricEvent, value: Any, key: int | None) -> None:
        """Record the result `value` of a metric, such as `run.mean`; forget the metric's loops.

        `event`: the result of `metric_begins`. `key`: the seed that the random generators have after the
        call, or `None` if the call has not changed it.
        """
        self._levels.remove(self._level_of(event))
        event.done, event.value, event.key, event.after = True, value, key, self.counters()
        event.events = []

    def metric_left(self, event: MetricEvent) -> None:
        """Forget a call of a metric, such as `run.mean`, that ended with an exception."""
        self._levels.remove(self._level_of(event))
        events = self._levels[-1].events
        if events and events[-1] is event:
            events.pop()

    def passes_save(self) -> bool:
        """Record a call of `run.save` outside of loops; return whether a resumed run only repeats it."""
        event = self._expect(SaveEvent) if self.is_replaying else SaveEvent()
        if event is not None:
            self._levels[-1].events.append(event)
        return self.is_replaying

    # --- levels ----------------------------------------------------------------------------------

    def _expect(self, kind: type[EventT], name: object = None) -> EventT | None:
        """Return the recorded event that a resumed script now repeats; `None` for a new call.

        A script may decide by a value, such as a best score, whether to save or evaluate, and may lack this
        value while it repeats earlier calls. So it may leave out recorded saves and metrics, or make more.

        Args:
            kind: class of the event: a call of `run.epochs`, a loop, a metric or a save.
            name: the key of a loop or the name of a metric.

        Raises:
            CheckpointError: for a call of `run.epochs` if another event must come first.
        """
        level = self._around if kind in (PhaseEvent, LoopEvent) else self._levels[-1]
        if self._target is None or level.ahead is None:
            return None
        for event in level.ahead:
            if isinstance(event, kind) and _name(event) == name:
                del level.ahead[: level.ahead.index(event) + 1]
                return event
            if not self._may_be_missing(event):
                break
        if kind is PhaseEvent:
            raise _elsewhere("at run.epochs")
        return None

    def _may_be_missing(self, event: Event) -> bool:
        is_done = isinstance(event, MetricEvent) and event.done
        return (is_done or isinstance(event, SaveEvent)) and event is not self._last

    def _enter(
        self, event: Event, ahead: list[Event] | None = None, *, waits: bool = False
    ) -> None:
        level = self._levels[-1] if isinstance(event, MetricEvent) else self._around
        level.events.append(event)
        self._levels.append(_Level(event.events, ahead or [], event, waits))

    @property
    def _around(self) -> _Level:
        """Level of the innermost `run.epochs` or metric that the script is in, else the top level.

        New loops are recorded in this level. Levels of loops are skipped: a loop that the script left by an
        exception may still be among them.
        """
        level = self._levels[-1]
        for level in reversed(self._levels):
            if not isinstance(level.of, LoopEvent):
                break
        return level

    def _level_of(self, event: Event) -> _Level:
        return next(level for level in self._levels if level.of is event)

    # --- replay ----------------------------------------------------------------------------------

    def begin_replay(self, target: SavedPosition) -> None:
        """Begin to repeat the script of a resumed run up to its saved position, `target`."""
        self._target, self.is_replaying = target, True
        self._levels = [_Level([], list(target.events))]
        events = target.events
        while events:
            self._last = last = events[-1]
            is_open = isinstance(last, PhaseEvent) and not (last.ended or last.complete)
            is_open |= isinstance(last, MetricEvent) and not last.done
            events = last.events if is_open else ()  # the target is inside of an open event

    @property
    def is_repeating(self) -> bool:
        """Whether a resumed run is repeating a loop or call that was recorded before the restart."""
        return self._target is not None and self._levels[-1].ahead is not None

    def check_arrived(self) -> None:
        """Raise `CheckpointError` if a resumed script has ended before its saved position."""
        if self._target is not None:
            raise _elsewhere("at its end")

    @property
    def has_arrived(self) -> bool:
        """Whether the script of a resumed run has reached its saved position."""
        is_open = any(level.waits or level.ahead for level in self._levels)
        return self._target is not None and not is_open

    def arrive(self) -> SavedPosition:
        """Record that a resumed script has reached its saved position, and return this position."""
        target, self._target, self.is_replaying = self._target, None, False
        assert target is not None, "replay has a target"
        self._set(target.counters)
        return target


def _name(event: Event) -> object:
    """Return the key of a loop or the name of a metric, by which a recorded event is identified.

    `None` for other events, which are identified by their class alone.
    """
    if isinstance(event, LoopEvent):
        return event.key
    return event.call if isinstance(event, MetricEvent) else None


def _elsewhere(where: str) -> CheckpointError:
    return CheckpointError(
        f"the script does not come to where its state was saved: it is {where} without what was there "
        "before",
        hint="a run continues with the script and the data it began with; whether loops, epochs and saves "
        "come must not follow from variables of the script that are not registered; --fresh begins anew",
    )
