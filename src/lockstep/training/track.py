"""The way of a run through phases, epochs and loops: where it is, and how it gets back there.

A script that is started again runs from its top. What it did before the position is passed over: phases
and epochs that are done, loops that have updated parameters. Loops that only evaluated run again, since
the script may want their values.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from lockstep.checkpoint.position import LoopPosition, Position
from lockstep.data.microbatch import Batching, Start
from lockstep.errors import CheckpointError, RunDirectoryError


class Track:
    """Counts phases, epochs and loops, and passes over what is done.

    Attributes:
        steps: updates until here.
        stretch: number of the stretch: another one for every epoch and every phase, part of all keys.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.stretch = 0
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._loaders = 0
        self._before = (0, 0)  # loaders and steps when the epoch began
        self._phases: list[tuple[int, int, int]] = []
        self._epoch: int | None = None
        self._outside: list[LoopPosition] = []
        self._inside: list[LoopPosition] = []
        self._target: Position | None = None
        self._passed = 0

    # --- where it is -----------------------------------------------------------------------------

    def position(self, points: int) -> Position:
        """Return where the run stands, having passed so many points."""
        loaders, before = self._before
        return Position(
            steps=self.steps,
            points=points,
            phase=len(self._phases),
            epoch=self._epoch,
            stretch=self.stretch,
            loaders=loaders,
            before=before,
            rounds=tuple(sorted(self._rounds.items())),
            phases=tuple(self._phases),
            loops=(*self._outside, *self._inside),
        )

    @property
    def is_outside(self) -> bool:
        """Whether the run is outside of epochs."""
        return self._epoch is None

    @property
    def _loops(self) -> list[LoopPosition]:
        return self._outside if self._epoch is None else self._inside

    def _begin_stretch(self) -> None:
        if self._rounds:
            self.stretch += 1
            self._rounds.clear()

    # --- what happens ----------------------------------------------------------------------------

    def phase_begins(self, count: int) -> range:
        """Return the epochs of a phase of `count` that are still to be run."""
        target, phase = self._target, len(self._phases)
        if target is None:
            return range(count)
        if phase < target.phase:
            self.stretch, self._loaders, self.steps = target.phases[phase]
            self._rounds.clear()
            return range(0)
        if target.epoch is None:
            raise _elsewhere(f"outside of epochs, before phase {phase} of them")
        return range(min(target.epoch, count), count)

    def epoch_begins(self, epoch: int) -> None:
        """An epoch begins."""
        self._begin_stretch()
        self._epoch = epoch
        target = self._target
        if target is not None:
            self.stretch, self._loaders, self.steps = target.stretch, target.loaders, target.before
        self._before = (self._loaders, self.steps)

    def epoch_ends(self) -> None:
        """The script is done with an epoch: from here on it stands before the next one."""
        if self._target is not None:
            raise _elsewhere(f"in epoch {self._epoch}")
        assert self._epoch is not None
        self._inside.clear()
        self._begin_stretch()
        self._epoch += 1
        self._before = (self._loaders, self.steps)

    def phase_ends(self) -> None:
        """All epochs of a phase are done."""
        target = self._target
        if target is not None and len(self._phases) == target.phase and target.epoch is not None:
            self.stretch, self._loaders, self.steps = target.stretch, target.loaders, target.before
            self._passed = len(target.loops)
            self._rounds.clear()
        self._begin_stretch()
        self._before = (self._loaders, self.steps)
        self._phases.append((self.stretch, *self._before))
        self._epoch = None

    def new_loader(self) -> int:
        """Return the number of a loader that the script makes now, part of its loops' keys."""
        number, self._loaders = self._loaders, self._loaders + 1
        return number

    def loop_begins(self, loader: int, batching: Batching) -> Start:
        """Return where a loop over `loader` that begins now starts.

        Raises:
            RunDirectoryError: if the run was in the middle of it, when it had another `batching`.
        """
        round_ = self._rounds[loader]
        self._rounds[loader] += 1
        start = Start(epoch=self.stretch, round=round_)
        done = self._done(loader, round_)
        if done is None:
            return start
        self._check_the_same(done, batching)
        self._passed += 1
        self._loops.append(done)
        self.steps = done.steps
        return replace(start, batch=done.batches, is_over=done.complete)

    def _done(self, loader: int, round_: int) -> LoopPosition | None:
        loops = () if self._target is None else self._target.loops
        key = (loader, self.stretch, round_)
        return next((loop for loop in loops if loop.key == key), None)

    def _check_the_same(self, done: LoopPosition, batching: Batching) -> None:
        """Refuse to go on in the middle of a loop whose batches are others now; one that is over may be."""
        if done.complete or done.batching is None:
            return
        differences = done.batching.differences(batching)
        if differences:
            where = "" if self._epoch is None else f" of epoch {self._epoch}"
            raise RunDirectoryError(
                f"the run stopped after batch {done.batches} of a loop{where} over loader {done.loader}, "
                "which makes other batches now: " + "; ".join(differences),
                hint="go on with the batch size and the data that it began with; --fresh begins anew, "
                "--run-dir names another directory",
            )

    def trained(self, loop: LoopPosition) -> None:
        """A loop that has updated parameters stands at `loop`."""
        loops, loop = self._loops, replace(loop, steps=self.steps)
        if loops and loops[-1].key == loop.key:
            loops[-1] = loop
        else:
            loops.append(loop)

    # --- the way back ----------------------------------------------------------------------------

    def set_out(self, target: Position) -> None:
        """The run was at `target` before: from here on, pass over what was done until then."""
        self._target = target

    @property
    def is_on_the_way(self) -> bool:
        """Whether the target has not been reached yet."""
        return self._target is not None

    def check_arrived(self) -> None:
        """The script is at its end.

        Raises:
            CheckpointError: if it has not come to its target.
        """
        if self._target is not None:
            raise _elsewhere("at its end")

    def arrives(self) -> Position | None:
        """Return the target if the run has just reached it: from here on nothing is passed over."""
        target = self._target
        if target is None or self._passed < len(target.loops):
            return None
        here = (len(self._phases), self._epoch)
        beyond = (target.phase + 1, None)  # an epoch after the last one: the phase is over
        if here != (target.phase, target.epoch) and (here != beyond or target.epoch is None):
            return None
        self._target = None
        self._rounds.clear()
        self._rounds.update(target.rounds)
        self.steps = target.steps
        return target


def _elsewhere(where: str) -> CheckpointError:
    return CheckpointError(
        f"the script does not come to where its state was saved: it is {where} without a loop that was "
        "there before",
        hint="a run continues with the script and the data it began with; --fresh begins anew",
    )
