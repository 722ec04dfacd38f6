"""Carried variables: warnings of script variables that a loop changes and that a crash would lose.

A resumed run starts its script from the top: variables that are not saved have their first values again.
The main rank compares fingerprints of the variables between the first batches of a run, where the state is
complete, and after a resume with the fingerprints that were saved with the state.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.engine.data.loader import Loader
from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.recovery.script_state import ScriptState
from lockstep.engine.recovery.state import State
from lockstep.engine.training import liveness, variables
from lockstep.engine.training.listeners import PointListener
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.observations import Observation, Value, VariableChange, VariableId
from lockstep.engine.training.variable_parts import attributes
from lockstep.errors import listed
from lockstep.world.model import World

#: Number of a run's first points at which variables are always compared; maximal number of comparisons.
_FIRST, _LOOPS = 2, 8
#: Number of characters of saved fingerprints: equal on all ranks, which write behind them in a snapshot.
SAVED = 4096
#: Number of values that are read for the saved fingerprints, which are made often.
_BUDGET_SAVED = 300
#: Number of variables in one warning.
_NAMED = 8
#: By the cause of a change: words for the warning, and a hint.
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
#: By the kind of a variable: a hint.
_HINTS = {
    "random": "draw from the global generators of torch, numpy or random, which the run sets",
    "object": "choose it by run.epoch, run.step or what run.state keeps",
    "attribute": "let state_dict() return it, or keep it in run.state(…)",
}
#: Classes of values of `run.state` that the script may have in variables of its own, too.
_HELD = (list, dict, set, deque, torch.Tensor, np.ndarray)


class CarriedVariables(PointListener):
    """Warns of the script's variables that loops change and a crash would lose, on the main rank.

    Args:
        loop: position of the run.
        state: models, optimizers and registered objects, which a resumed run restores.
        world: rank and restart number of this process.
        warn: shows a line to the user.

    Attributes:
        loaders: loaders of the run, whose datasets are read too.
        resumed: text that `saved` returned when the state was saved from which the run resumes;
            empty in a new run.
    """

    def __init__(self, loop: Loop, state: State, world: World, warn: Callable[[str], None]) -> None:
        self._loop, self._rank, self._warn = loop, world.rank, warn
        self._is_restarted = world.generation > 0  # the first start has shown the warnings
        self._own = _OwnObjects(state)
        self._frames = _Frames()
        self._last: dict[str, tuple[Hashable, Observation]] = {}
        self._place: Hashable = None  # of the outermost loop over a loader
        self._initial: dict[str, str] = {}  # fingerprints before the first loop
        self._warned: set[str] = set()
        self._points = self._looks = 0
        self._is_new = self._failed = False  # `_is_new`: a loop has begun since the last point
        self.loaders: Collection[Loader] = ()
        self.resumed = ""

    def opens(self) -> None:
        """Assign numbers to the script's stack frames around `with lockstep.Run(…)`.

        By the number of its frame, a local variable is told apart from the same variable in another call of
        the function.
        """
        self._frames.hold("run", sys._getframe(1))

    def epoch_begins(self) -> None:
        """Warn of the script's variables that have changed since the end of the previous loop."""
        self._frames.hold("epochs", sys._getframe(1))
        if "ended" in self._last:
            self._tell(self._changes("ended", None, self.observe(sys._getframe(1))))
            del self._last["ended"]
        self._is_new = True

    def loop_begins(self, loop: LoopKey) -> None:
        """Number the script's stack frames; a frame keeps its number until the loop ends.

        Before the run's first loop, the main rank also records fingerprints of the script's variables.
        """
        self._frames.hold(loop, sys._getframe(1))
        self._is_new = True
        if self._loop.microbatch is None:
            self._place = loop
        if not (self._rank or self._points or self._initial or self._loop.is_replaying):
            self._initial = self.observe(sys._getframe(1)).texts(1 << 20)

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        """Record fingerprints of the script's variables after an outermost loop over a loader.

        `epoch_begins` compares them with the values at the beginning of the next epoch.
        """
        self._frames.release(loop)
        is_outermost = self._loop.microbatch is None and not self._loop.is_replaying
        if is_outermost and not self._rank and self._looks < _LOOPS:
            ended = self.observe(sys._getframe(1), look=liveness.carried_around)
            self._last["ended"] = None, ended

    # --- in a run ---------------------------------------------------------------------------------

    def at_point(self) -> None:
        """Warn of unsaved script variables that the first batches or epochs of a run change."""
        if self._rank or not (self._is_new or self._points < _FIRST):
            return
        self._points += 1
        if self._points <= _FIRST or self._looks < _LOOPS:
            self._looks += 1
            frame = sys._getframe(1)
            changes = self._inside(self.observe(frame))
            around = self.observe(frame, look=liveness.carried_around)
            # An epoch may set an attribute anew before its loop: `epoch_begins` compares attributes.
            own = (one for one in self._changes("around", None, around) if "." not in one.name)
            self._tell([*changes, *own])
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
        """Return fingerprints of the script's variables, from `frame` outwards, and of the run's modules.

        Args:
            frame: innermost frame; frames of Lockstep and of libraries are left out.
            budget: maximal number of values that are read.
            look: returns the variables that a frame reads later.
            changed: whether to leave out modules whose attributes are the same as when the run got them.
            innermost: whether to read only the innermost frame of the script, and no modules.
        """
        if not self._loop.epochs:
            self._frames.release("epochs")
        if self._failed:
            return Observation()
        try:
            own, number = self._own.ids(), id if innermost else self._frames.number
            loaders: dict[str, Any] = {f"loader {one.number}": one for one in self.loaders}
            others = {} if innermost else loaders | self._own.hooks()
            limits: Any = {"innermost": innermost, "budget": budget}
            found = variables.observe(frame, own, number=number, look=look, others=others, **limits)
            attributes = {} if innermost else self._own.attributes(changed=changed)
            return Observation({**attributes, **found.values})
        except Exception as error:  # a fault of Lockstep must not end the run
            self._failed = True
            self._warn(
                f"lockstep: warning: the script's variables cannot be looked at ({error!r:.200}): those "
                "that a crash loses are not named"
            )
            return Observation()

    def _inside(self, now: Observation) -> list[VariableChange]:
        """Return the variables whose fingerprints changed since the previous call in the same loop.

        `now`: the current fingerprints.
        """
        return self._changes("inside", self._place if self._loop.is_in_loop else None, now)

    def _changes(self, moment: str, place: Hashable, now: Observation) -> list[VariableChange]:
        """Return the variables that changed since the last call with the same `moment` and `place`.

        `moment` names a kind of comparison, such as `ended` (after a loop); `place` identifies the loop;
        `now` has the current fingerprints.
        """
        before, last = self._last.get(moment, (place, Observation()))
        known = last.values if place == before else {}
        # A call with a smaller budget leaves variables out.
        self._last[moment] = (place, Observation({**known, **now.values}))
        return now.changes_since(Observation(known))

    def _first(self, change: VariableChange) -> VariableChange:
        """Return a copy of `change` in which `before` is the value before the run's first loop.

        A counter that had no value then, such as the index of `enumerate`, gets the kind `count` instead.
        """
        is_count = change.kind == "value" and change.before.isdecimal()
        if is_count and change.key not in self._initial:  # as the index of `enumerate`
            return replace(change, kind="count")
        return replace(change, before=self._initial.get(change.key, change.before))

    def _tell(self, changes: list[VariableChange]) -> None:
        """Warn the user of changed variables, once for each name, in one line for each cause."""
        new = {one.name: one for one in changes if one.name not in self._warned}
        # As `sampler.set_epoch(epoch)` sets it: a resumed run does the same.
        epoch = str(self._loop.epoch)
        own = [one for one in new.values() if "." not in one.name or one.after != epoch]
        changes = [] if self._is_restarted else sorted(own, key=lambda one: (one.line, one.name))
        self._warned.update(one.name for one in changes)
        for cause, (what, hint) in _WORDS.items():
            some = [one for one in changes if self._cause(one) == cause]
            verb = ("changes", "is") if len(some) == 1 else ("change", "are")
            if some:
                keep = "" if cause == "fetch" else _hint([self._first(one) for one in some])
                self._warn(
                    f"lockstep: warning: {named(some)} {verb[0]} {what} and {verb[1]} not kept over a "
                    f"crash; hint: {'; '.join(filter(None, (hint, keep)))}"
                )

    def _cause(self, change: VariableChange) -> str:
        """Return the key of `_WORDS` for a variable's change: `pass`, `fetch`, or an empty text.

        `pass`: computing a microbatch changes the variable. `fetch`: fetching samples changes it. The empty
        text stands for anything else in the loop.
        """
        audit = self._loop.audit
        if audit is not None and change.name in audit.changed:
            return "pass"
        is_fetched = change.kind == "data" and self._loop.is_in_loop and audit is not None
        return "fetch" if is_fetched else ""

    # --- over a crash -----------------------------------------------------------------------------

    def saved(self) -> str:
        """Return fingerprints of the script's variables as one text of `SAVED` characters, to be saved.

        The text is blank on all ranks except rank 0.
        """
        if self._rank or self._loop.closed:
            return " " * SAVED
        now = self.observe(sys._getframe(1), _BUDGET_SAVED, changed=True)
        if self._loop.is_in_loop:  # between loops, `run.save` may stand at any line of an epoch
            self._tell(self._inside(now))
        return packed(now.texts(SAVED // 2))

    def arrived(self) -> None:
        """Warn of script variables that differ from their saved fingerprints after a resume."""
        if self._rank or not self.resumed.strip():
            return
        texts, self.resumed = unpacked(self.resumed), ""
        changes = self.observe(sys._getframe(1)).changes_since_saved(texts)
        changes.sort(key=lambda one: one.line)
        if changes:
            some = [f"{one.shown} was {one.before}, and is {one.after} now" for one in changes]
            self._warned.update(one.name for one in changes)
            self._warn(
                f"lockstep: warning: variables are not what they were when the state was saved: "
                f"{listed(some, _NAMED, between='; ')}; the result may differ; hint: "
                + _hint([replace(one, before=one.after) for one in changes])
            )


def packed(texts: dict[str, str]) -> str:
    """Return the fingerprints `texts`, by name, as one text of exactly `SAVED` characters.

    As long as the text is too long, the second half of the fingerprints is dropped.
    """
    while True:
        text = base64.b64encode(json.dumps(texts).encode()).decode()
        if len(text) <= SAVED:
            return text.ljust(SAVED)
        texts = dict(itertools.islice(texts.items(), len(texts) // 2))


def unpacked(text: str) -> dict[str, str]:
    """Return the fingerprints in a text that `packed` returned; an empty dictionary for any other text."""
    try:
        texts = json.loads(base64.b64decode(text.strip()))
        return {str(name): str(one) for name, one in texts.items()}
    except (ValueError, AttributeError):
        return {}


def named(changes: Sequence[VariableChange]) -> str:
    """Return a text with the names of changed variables and the lines that assign them, for messages."""
    return listed([one.shown for one in changes], _NAMED)


def _hint(changes: Sequence[VariableChange]) -> str:
    """Return hints for a message: code that saves the changed variables with the run.

    The hint for `run.state` gives each variable the value that it had before the change.
    """
    hints = []
    plain = [one for one in changes if one.kind in ("value", "data")]
    if plain:
        first = ", ".join(f"{_word(one.name)}={_initial(one.before)}" for one in plain[:_NAMED])
        hints.append(f"state = run.state({first})")
    modules = [one.name for one in changes if one.kind == "module"]
    if modules:
        hints.append(f'run.register("{modules[0]}", {modules[0]})')
    hints += [hint for kind, hint in _HINTS.items() if any(one.kind == kind for one in changes)]
    if any(one.kind == "count" or (one.before + one.after).isdecimal() for one in changes):
        hints.append("run.step counts updates")
    return "; ".join(hints)


def _word(name: str) -> str:
    """Return the last identifier in a dotted name, such as `sigma` in `dataset.sigma`.

    Names with leading double underscores are skipped. Without an identifier the result is `value`.
    """
    words = [word for word in name.split(".") if word.isidentifier() and not word.startswith("__")]
    return words[-1] if words else "value"


def _initial(text: str) -> str:
    """Return a variable's first value as Python code for a hint, from `text`, its fingerprint.

    The result is `…` for a fingerprint of more than 12 characters, of a tensor or of an array.
    """
    if text.removeprefix("-") in ("inf", "nan"):
        return f'float("{text}")'
    return text if len(text) <= 12 and not text.startswith(("tensor", "array")) else "…"


class _Frames:
    """Assigns numbers to the script's running frames.

    Unlike an `id`, a number is never used for a second frame.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: dict[Hashable, set[int]] = {}
        self._next = itertools.count(1)

    def hold(self, key: Hashable, frame: FrameType) -> None:
        """Assign a number to each of the script's stack frames, from `frame` outwards.

        A frame keeps its number until `release(key)`; `key` is any name for this group of frames.
        """
        self._held[key] = {id(one) for one in variables.script_frames(frame)}
        alive = set().union(*self._held.values())
        self._numbers = {one: self._numbers.get(one) or next(self._next) for one in alive}

    def release(self, key: Hashable) -> None:
        """Drop the numbers that `hold(key, …)` assigned, except for frames of another key."""
        if self._held.pop(key, None):
            alive = set().union(*self._held.values())
            self._numbers = {one: number for one, number in self._numbers.items() if one in alive}

    def number(self, frame: FrameType) -> int:
        """Return the number that `hold` gave a frame; for any other frame, a new number in each call."""
        return self._numbers.get(id(frame)) or next(self._next)


class _OwnObjects:
    """Models, optimizers, schedulers and objects of `run.register`, which the run itself saves."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._count = 0
        self._ids: frozenset[int] = frozenset()
        self._parts: list[tuple[str, nn.Module]] = []
        self._initial: list[dict[str, Any]] = []  # plain attributes of `_parts` at first

    def ids(self) -> frozenset[int]:
        """Return the ids of all objects whose state the run saves, and of modules and tensors in them."""
        state, registered = self._state, self._state.registered
        own = [*state.optimizers, *state.schedulers, *registered.values()]
        if len(own) + len(state.models) != self._count:
            self._count = len(own) + len(state.models)
            modules = [(type(one.module).__name__, one.module) for one in state.models]
            modules += [pair for pair in registered.items() if isinstance(pair[1], nn.Module)]
            self._parts = [pair for name, one in modules for pair in one.named_modules(prefix=name)]
            own += [one for model in state.models for one in (model.wrapped, *model.parameters)]
            own += [part for _, part in self._parts]
            for _, module in modules:
                own += [*module.parameters(), *module.buffers()]
            self._ids = frozenset(map(id, own))
            self._initial = [_plain(one) for _, one in self._parts]
        # Containers and tensors alone: Python has one object for all small numbers of a value.
        kept = [one.state_dict() for one in registered.values() if isinstance(one, ScriptState)]
        values = (one for state in kept for one in state.values() if isinstance(one, _HELD))
        return self._ids.union(map(id, values))

    def hooks(self) -> dict[str, Any]:
        """Return the hooks of `register_step_post_hook` by name; they may hold script variables."""
        return {
            f"hook {number} of {type(one).__name__}": hook
            for one in self._state.optimizers
            for number, hook in enumerate(one._optimizer_step_post_hooks.values())
        }

    def attributes(self, *, changed: bool) -> dict[VariableId, Value]:
        """Return fingerprints of attributes that a `state_dict` lacks, such as `Dropout.p`.

        The attributes are those of modules of the run's models and registered objects. `changed`: whether
        to leave out modules whose plain attributes are still those that they had when the script gave them
        to the run.
        """
        found: dict[VariableId, Value] = {}
        for number, (name, one) in enumerate(self._parts):
            if changed and self._initial[number] == _plain(one):
                continue
            if type(one).get_extra_state is nn.Module.get_extra_state:
                own = variables.of_object(name, one, self._ids).items()
                found |= {
                    place._replace(frame=-number - 1): replace(value, kind="attribute")
                    for place, value in own
                }
        return found


def _plain(value: Any) -> dict[str, Any]:
    return {name: one for name, one in attributes(value) if type(one) in (int, float, str)}
