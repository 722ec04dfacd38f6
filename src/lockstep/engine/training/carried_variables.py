"""Carried variables of the script: what its loops carry, and a crash loses, is told once.

A run that resumes starts its script from the top, so that a variable has its first value again.
Fingerprints of the variables are compared at the first points of a run, and those that were saved with the
state are compared when the run has resumed. On the main rank alone: it is the one that warns.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from lockstep.engine.data.loader import Loader
from lockstep.engine.recovery.state import State
from lockstep.engine.training import liveness, variables
from lockstep.engine.training.listeners import PointListener
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.observations import Change, Observation
from lockstep.engine.training.own_objects import OwnObjects
from lockstep.world.model import World

#: Points of a run, and ends of epochs, after which variables are looked at; so many first points of loops.
_FIRST, _LOOPS = 2, 8
#: Characters of what is saved: the same on all ranks, whose parts of a snapshot lie behind it.
SAVED = 4096
#: Values that are looked at where a state is saved, which happens often.
_BUDGET_SAVED = 300
#: What is said of changes, by their cause, and what helps.
_WORDS = {
    "pass": (
        "with each microbatch, of those of this rank only,",
        "run.sum, run.mean and run.all_gather are over all ranks",
    ),
    "fetch": (
        "with the samples that this rank fetches",
        "let a sample depend on its index and what set_epoch(run.epoch) gives alone",
    ),
    "": ("in the loop", ""),
}
#: Variables that one warning names.
_NAMED = 8


class CarriedVariables(PointListener):
    """Looks at the variables that the script's loops carry.

    Args:
        loop: where the run stands.
        state: what the run has been told of, which no crash loses.
        world: rank and generation of this process.
        warn: shows a line.

    Attributes:
        own: the objects of the run.
        loaders: of the run, whose datasets are looked at.
        resumed: what `saved` has returned when the state was saved that the run resumes from.
    """

    def __init__(self, loop: Loop, state: State, world: World, warn: Callable[[str], None]) -> None:
        self._loop, self._rank, self._warn = loop, world.rank, warn
        self._is_restarted = world.generation > 0  # changes were told in the first generation
        self.own = OwnObjects(state)
        self._frames = _Frames()
        # What was seen last in the loop, or between the epochs, of now; and of the loops around them.
        self._last: tuple[Any, Observation] = (None, Observation())
        self._around = Observation()
        self._ended = Observation()  # what was seen when the latest loop ended
        self._place: Any = None
        self._phase = 0
        self._initial: dict[str, str] = {}  # what variables held before the first loop
        self._told: set[str] = set()
        self._points = self._ends = self._looks = 0
        self._is_new = False  # whether a loop, or an epoch, has begun since the last point
        self._failed = False
        self.loaders: Collection[Loader] = ()
        self.resumed = ""

    def opens(self) -> None:
        """The script enters the run: the frame that does so stays until it leaves."""
        self._frames.hold("run", sys._getframe(1))

    def epoch_begins(self) -> None:
        """An epoch begins: the frame that iterates over them stays until they are over."""
        self._frames.hold("epochs", sys._getframe(1))
        if self._ended.values:
            self._tell(self.observe(sys._getframe(1)).changes_since(self._ended))
            self._ended = Observation()
        self._phase += self._loop.epoch == 0
        self._is_new = True

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins."""
        self._frames.hold((loader, epoch, round_), sys._getframe(1))
        self._is_new = True
        if self._loop.microbatch is None:
            self._place = (loader, epoch, round_)
        if not (self._rank or self._points or self._initial or self._loop.is_replaying):
            self._initial = self.observe(sys._getframe(1)).texts(1 << 20)

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over."""
        self._frames.release((loader, epoch, round_))
        is_outermost = self._loop.microbatch is None and not self._loop.is_replaying
        if is_outermost and not self._rank and self._looks < _LOOPS:
            self._ended = self.observe(sys._getframe(1), look=liveness.carried_around)

    # --- in a run ---------------------------------------------------------------------------------

    def at_point(self) -> None:
        """The state is whole: look whether variables have changed, if it is one of the first points."""
        is_end = not self._loop.is_in_loop
        if self._rank or not (self._is_new or is_end or self._points < _FIRST):
            return
        self._points += 1
        self._ends += is_end
        is_first = self._points <= _FIRST or (is_end and self._ends <= _FIRST)
        if is_first or (self._is_new and self._looks < _LOOPS):
            self._looks += 1
            changes = self._changes(self.observe(sys._getframe(1)))
            around = self.observe(sys._getframe(1), look=liveness.carried_around)
            # Attributes are compared when the epoch is over: one may have set them when it began.
            own = (one for one in around.changes_since(self._around) if "." not in one.name)
            self._tell([*changes, *own])
            self._around = Observation({**self._around.values, **around.values})
        self._is_new = False

    def observe(
        self,
        frame: FrameType,
        budget: int = variables.BUDGET,
        look: Callable[..., liveness.Uses] = liveness.carried,
        *,
        changed: bool = False,
        innermost: bool = False,
    ) -> Observation:
        """Return what variables hold, and attributes of the run's objects that their state leaves out.

        Args:
            frame: from which on the script's frames are looked at.
            budget: how many values of variables are looked at.
            look: returns which variables of a frame count.
            changed: whether attributes count only if they have changed since the run was given the objects.
            innermost: whether the innermost frame of the script is the only one.
        """
        if not self._loop.epochs:
            self._frames.release("epochs")
        if self._failed:
            return Observation()
        try:
            own, number = self.own.ids(), id if innermost else self._frames.number
            loaders: dict[str, Any] = {f"loader {one.number}": one for one in self.loaders}
            found = variables.observe(
                frame,
                own,
                number=number,
                look=look,
                innermost=innermost,
                budget=budget,
                others={} if innermost else loaders | self.own.hooks(),
            )
            attributes = {} if innermost else self.own.attributes(changed=changed)
            return Observation({**attributes, **found.values})
        except Exception as error:  # a fault of ours must not end the run
            self._failed = True
            self._warn(
                f"lockstep: warning: the script's variables cannot be looked at ({error!r:.200}): those "
                "that a crash loses are not named"
            )
            return Observation()

    def _first(self, change: Change) -> Change:
        """Return a change with the value that the variable had before the first loop."""
        is_count = change.kind == "value" and change.before.isdecimal()
        if is_count and change.key not in self._initial:  # as the index of `enumerate`
            return replace(change, kind="count")
        return replace(change, before=self._initial.get(change.key, change.before))

    def _changes(self, now: Observation) -> list[Change]:
        """Return what has changed since the last look in this loop, or between these epochs."""
        place = self._place if self._loop.is_in_loop else self._phase
        before, last = self._last
        known = last.values if place == before else {}
        self._last = (place, Observation({**known, **now.values}))  # it may have left some out
        return now.changes_since(last) if place == before else []

    def _tell(self, changes: list[Change]) -> None:
        new = {one.name: one for one in changes if one.name not in self._told}
        changes = [one for one in new.values() if not self._is_epoch(one)]
        if self._is_restarted:
            return
        changes.sort(key=lambda one: (one.line, one.name))
        self._told.update(one.name for one in changes)
        for cause, (what, hint) in _WORDS.items():
            some = [one for one in changes if self._cause(one) == cause]
            verb = ("changes", "is") if len(some) == 1 else ("change", "are")
            if some:
                own = "" if cause == "fetch" else _hint([self._first(one) for one in some])
                self._warn(
                    f"lockstep: warning: {named(some)} {verb[0]} {what} and {verb[1]} not kept over a "
                    f"crash; hint: {'; '.join(filter(None, (hint, own)))}"
                )

    def _cause(self, change: Change) -> str:
        """Return what changes a variable: a pass over a microbatch, a sample that is fetched, or else."""
        audit = self._loop.audit
        if audit is not None and change.name in audit.changed:
            return "pass"
        is_fetched = change.kind == "data" and self._loop.is_in_loop and audit is not None
        return "fetch" if is_fetched else ""

    def _is_epoch(self, change: Change) -> bool:
        """Whether an attribute is the number of the epoch, as `sampler.set_epoch(epoch)` sets it."""
        return "." in change.name and change.after == str(self._loop.epoch)

    # --- over a crash -----------------------------------------------------------------------------

    def saved(self) -> str:
        """Return fingerprints to be saved with the state, of the same length everywhere."""
        if self._rank or self._loop.closed:
            return " " * SAVED
        now = self.observe(sys._getframe(1), _BUDGET_SAVED, changed=True)
        self._tell(self._changes(now))
        return packed(now.texts(SAVED // 2))

    def arrived(self) -> None:
        """The run has come to where its state was saved: compare what the variables hold with then."""
        if self._rank or not self.resumed.strip():
            return
        texts, self.resumed = unpacked(self.resumed), ""
        changes = self.observe(sys._getframe(1)).changes_since_saved(texts)
        changes.sort(key=lambda one: one.line)
        if changes:
            told = "; ".join(
                f"{one.shown} was {one.before}, and is {one.after} now" for one in changes[:_NAMED]
            )
            self._told.update(one.name for one in changes)
            self._warn(
                f"lockstep: warning: variables are not what they were when the state was saved: {told}"
                f"{_more(changes)}; the result may differ; hint: "
                + _hint([replace(one, before=one.after) for one in changes])
            )


def packed(texts: dict[str, str]) -> str:
    """Return fingerprints as `SAVED` characters that JSON writes as they are; too many are cut."""
    while True:
        told = base64.b64encode(json.dumps(texts).encode()).decode()
        if len(told) <= SAVED:
            return told.ljust(SAVED)
        texts = dict(itertools.islice(texts.items(), len(texts) // 2))


def unpacked(told: str) -> dict[str, str]:
    """Return what `packed` was given; nothing for what it has not made."""
    try:
        texts = json.loads(base64.b64decode(told.strip()))
        return {str(name): str(text) for name, text in texts.items()}
    except (ValueError, AttributeError):
        return {}


def named(changes: Sequence[Change]) -> str:
    """Return the variables and their lines, for messages."""
    return ", ".join(one.shown for one in changes[:_NAMED]) + _more(changes)


def _more(changes: Sequence[Change]) -> str:
    return f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""


def _hint(changes: Sequence[Change]) -> str:
    hints = []
    plain = [one for one in changes if one.kind in ("value", "data")]
    if plain:
        first = ", ".join(f"{_word(one.name)}={_initial(one.before)}" for one in plain[:_NAMED])
        hints.append(f"state = run.state({first})")
    modules = [one for one in changes if one.kind == "module"]
    if modules:
        hints.append(f'run.register("{modules[0].name}", {modules[0].name})')
    if any(one.kind == "random" for one in changes):
        hints.append(
            "draw from the global generators of torch, numpy or random, which the run sets"
        )
    if any(one.kind == "object" for one in changes):
        hints.append("choose it by run.epoch, run.step or what run.state keeps")
    if any(one.kind == "attribute" for one in changes):
        hints.append("let state_dict() return it, or keep it in run.state(…)")
    if any(one.kind == "count" or (one.before + one.after).isdecimal() for one in changes):
        hints.append("run.step counts updates")
    return "; ".join(hints)


def _word(name: str) -> str:
    """Return the last word of a variable's name that a script may give to a variable."""
    words = [word for word in name.split(".") if word.isidentifier() and not word.startswith("__")]
    return words[-1] if words else "value"


def _initial(text: str) -> str:
    """Return a value as a script may write it; dots where its fingerprint is none."""
    return text if len(text) <= 12 and not text.startswith(("tensor", "array")) else "…"


class _Frames:
    """Numbers of the frames around loops that are not over, which are alive until then."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._held: dict[Any, list[int]] = {}
        self._next = itertools.count(1)

    def hold(self, key: Any, frame: FrameType) -> None:
        """Number the script's frames from `frame` outwards, until `release`."""
        before = self._held.get(key, [])  # the same frames, mostly, which keep their numbers
        own = [id(one) for one in variables.script_frames(frame)]
        self._held[key] = own
        self._users.update(own)
        for one in own:
            self._numbers.setdefault(one, next(self._next))
        self._let_go(before)

    def release(self, key: Any) -> None:
        """They may be gone from here on."""
        self._let_go(self._held.pop(key, []))

    def _let_go(self, frames: list[int]) -> None:
        for one in frames:
            self._users[one] -= 1
            if not self._users[one]:
                del self._users[one], self._numbers[one]

    def number(self, frame: FrameType) -> int:
        """Return the number of a frame; always another one where it has none."""
        return self._numbers.get(id(frame)) or next(self._next)
