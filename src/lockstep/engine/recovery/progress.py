"""Progress of a run through its script, and replay: a resumed run repeats calls up to its saved position.

A script that is started again runs from its top. Until it comes to the position, its calls return what
they returned before:

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

#: A batch is computed again of so many of the first and of the last loops that are over: a script that
#: makes its epochs by itself may have thousands of them.
_AGAIN = 16


@dataclass(slots=True, eq=False)
class _Level:
    """Events of a script within a phase, a metric or a loop's batch, or outside of all.

    Attributes:
        events: those that the script has reached.
        ahead: during replay, those still to be reached; `None` inside of an event that was not recorded.
        of: the phase, metric or loop; `None` outside of all.
        waits: whether the position lies behind the end of `of`, which is replayed.
    """

    events: list[Event]
    ahead: list[Event] | None = field(default_factory=list)
    of: Event | None = None
    waits: bool = False


class Progress:
    """Counts steps, epochs, loops and metrics, and replays them up to a saved position, the target.

    Attributes:
        stretch: number of the stretch: another one for every epoch and every phase, part of all keys.
        is_replaying: whether the target has not been reached yet.
        evaluated_again: loaders of loops that ran again, since they only evaluate.
    """

    def __init__(self) -> None:
        self.steps = self.stretch = 0
        self.is_replaying = False
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._loaders = 0
        self._levels = [_Level([])]
        self._target: Position | None = None
        self._last: Event | None = None  # before the target
        self.evaluated_again: list[int] = []

    # --- where it is -----------------------------------------------------------------------------

    def position(self, points: int) -> Position:
        """Return the position of the run, at point number `points`."""
        return Position(points=points, counters=self.counters(), events=self._levels[0].events)

    def counters(self) -> Counters:
        """Return the numbers of steps, stretches, loaders and rounds."""
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
        """Unfinished calls of metrics, the outermost first."""
        return [level.of for level in self._levels if isinstance(level.of, MetricEvent)]

    @property
    def depth(self) -> int:
        """Number of phases, metrics and loops around the script's current line."""
        return len(self._levels) - 1

    # --- phases and epochs -----------------------------------------------------------------------

    def phase_begins(self, count: int) -> range:
        """Return the epochs of a phase of `count` epochs that are still to be run, or replayed.

        Raises:
            StepError: inside of a metric.
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
        """Begin an epoch."""
        phase = self._phase
        level = self._level_of(phase)
        if self._target is not None and (level.ahead or level.waits or phase.epoch == epoch):
            return  # a replayed epoch begins as it did
        self._begin_stretch()
        phase.epoch, phase.begin, phase.ended = epoch, self.counters(), False
        phase.events = level.events = []

    def epoch_ends(self) -> None:
        """End an epoch.

        Raises:
            CheckpointError: if the run had reached another event before.
        """
        phase = self._phase
        level = self._level_of(phase)
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
        """End a phase, after its epochs or by a `break`."""
        phase = self._phase
        self._levels.remove(self._level_of(phase))
        if self._target is not None:
            self._set(phase.after)
            return
        self._begin_stretch()
        phase.complete, phase.after = True, self.counters()

    def phase_left(self) -> None:
        """End a phase that was left by `break`, or by an exception, which looks the same here."""
        if self._target is None:
            self.epoch_ends()
        elif not self._phase.complete:
            return  # not as before: the next call raises an error
        self.phase_ends()

    # --- loops -----------------------------------------------------------------------------------

    def new_loader(self) -> int:
        """Return the number of a new loader, part of its loops' keys."""
        number, self._loaders = self._loaders, self._loaders + 1
        return number

    def loop_begins(self, loader: int, batching: Batching) -> Start:
        """Begin a loop over `loader`; return its event and its first batch.

        Raises:
            RunDirectoryError: if the run was in the middle of the loop, with another `batching`.
        """
        epoch, round_ = self.stretch, self._rounds[loader]
        self._rounds[loader] += 1
        done, many = self._expect_loop((loader, epoch, round_))
        if done is None:
            event = LoopEvent(loader=loader, stretch=epoch, round=round_, batching=batching)
            self._levels.append(_Level(event.events, None if self._target else [], event))
            return Start(epoch=epoch, round=round_, loop=event)
        over = done.complete
        if not over:
            self._check_batching(done, batching)
        length = done.batching.batches
        is_done = over or length is None or done.batches >= length
        again = done.last if is_done and not many else None  # else other batches follow
        if again is None:
            self.steps = done.steps
            self._enter(done)
            if not done.batches and not over:  # it only evaluates
                self._around.events.remove(done)
        else:
            ahead, done.events = done.events, []
            self.steps = done.before
            self._enter(done, ahead, waits=True)
        batch = done.batches
        return Start(epoch=epoch, round=round_, batch=batch, again=again, is_over=over, loop=done)

    def _expect_loop(self, key: tuple[int, int, int]) -> tuple[LoopEvent | None, bool]:
        """Return the loop with this key to be reached, and whether it is one of many in the middle."""
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

    def _check_batching(self, loop: LoopEvent, batching: Batching) -> None:
        """Refuse to continue in the middle of a loop that makes other batches now."""
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
        """Record a loop that has updated parameters: it is part of positions from here on."""
        events = self._around.events
        if not events or events[-1] is not loop:
            events.append(loop)

    def repeated(self, loop: LoopEvent) -> None:
        """Note that the last batch of a loop has been computed again."""
        level = self._level_of(loop)
        level.waits, level.ahead = False, []
        self.steps = loop.steps

    def loop_ends(self, loop: LoopEvent, *, early: bool) -> None:
        """End a loop: not always the innermost, where loops are zipped."""
        level = self._level_of(loop)
        if self._target is not None and level.ahead is None and not early:
            self.evaluated_again.append(loop.loader)
        self._levels.remove(level)

    # --- metrics and saves -----------------------------------------------------------------------

    def metric_begins(self, call: str) -> MetricEvent:
        """Begin a call of a metric; during replay its event has the value that it returned."""
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
        """End a call of a metric, which returns `value`; the events of its items are dropped."""
        self._levels.remove(self._level_of(event))
        event.done, event.value, event.key, event.after = True, value, key, self.counters()
        event.events = []

    def metric_left(self, event: MetricEvent) -> None:
        """Remove a call of a metric that has ended with an exception."""
        self._levels.remove(self._level_of(event))
        events = self._levels[-1].events
        if events and events[-1] is event:
            events.pop()

    def passes_save(self) -> bool:
        """Note a call of `run.save` outside of loops; return whether it is replayed, and saves nothing."""
        event = self._expect(SaveEvent)
        if event is not None or self._target is None:
            self._levels[-1].events.append(event or SaveEvent())
        return event is not None or self._target is not None

    # --- levels ----------------------------------------------------------------------------------

    def _expect(self, kind: type[EventT], call: str = "") -> EventT | None:
        """Return the event of this kind that the run has reached here before; `None` for a new one.

        A script may decide by the best value so far, say, whether it saves or evaluates. During replay it
        lacks that value. So these calls may be missing, and there may be new ones.

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
        is_done = isinstance(event, MetricEvent) and event.done
        return (is_done or isinstance(event, SaveEvent)) and event is not self._last

    def _skip(self, level: _Level) -> None:
        """Drop calls that are missing in this replay, up to the first that may not be."""
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
        levels = reversed(self._levels)
        return next(level for level in levels if not isinstance(level.of, LoopEvent))

    def _level_of(self, event: Event) -> _Level:
        return next(level for level in self._levels if level.of is event)

    # --- replay ----------------------------------------------------------------------------------

    def begin_replay(self, target: Position) -> None:
        """Replay from here on, up to `target`."""
        self._target, self.is_replaying = target, True
        self._levels = [_Level([], list(target.events))]
        events = target.events
        while events:
            self._last = last = events[-1]
            # The target is inside of the last event if that is open.
            if isinstance(last, PhaseEvent):
                events = () if last.ended or last.complete else last.events
            else:
                is_open = isinstance(last, MetricEvent) and not last.done
                events = last.events if is_open else ()

    @property
    def is_repeating(self) -> bool:
        """Whether the script's current call is replayed, and its results are known."""
        return self._target is not None and self._levels[-1].ahead is not None

    def check_arrived(self) -> None:
        """Check at the end of the script that replay is over.

        Raises:
            CheckpointError: if the script has not come to the target.
        """
        if self._target is not None:
            raise _elsewhere("at its end")

    @property
    def has_arrived(self) -> bool:
        """Whether replay has come to its target; `arrive` ends it."""
        is_open = any(level.waits or level.ahead for level in self._levels)
        return self._target is not None and not is_open

    def arrive(self) -> Position:
        """End replay, and return the target."""
        target, self._target, self.is_replaying = self._target, None, False
        assert target is not None, "replay has a target"
        self._set(target.counters)
        return target


def _elsewhere(where: str) -> CheckpointError:
    return CheckpointError(
        f"the script does not come to where its state was saved: it is {where} without what was there "
        "before",
        hint="a run continues with the script and the data it began with; whether loops, epochs and saves "
        "come must not follow from variables of the script that are not registered; --fresh begins anew",
    )
