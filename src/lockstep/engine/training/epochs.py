"""The epochs of a run, as `run.epochs` yields them: those that are still to be run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from lockstep.engine.data.loader import observed
from lockstep.engine.layout import keys
from lockstep.engine.training.loop import Loop


def epochs_left(loop: Loop, count: int, epoch_ends: Callable[[int], None]) -> Iterator[int]:
    """Yield the epochs of a phase of `count` epochs that are still to be run.

    Args:
        loop: where the run stands.
        count: how many epochs the phase has.
        epoch_ends: called at the end of each that was not run before.
    """
    return observed(_epochs(loop, count, epoch_ends), loop)


def _epochs(loop: Loop, count: int, epoch_ends: Callable[[int], None]) -> Generator[int]:
    loop.first_error.check()
    loop.epochs, loop.phases = count, loop.phases + 1
    loop.approach()
    for epoch in loop.progress.phase_begins(count):
        loop.epoch = epoch
        loop.progress.epoch_begins(epoch)
        loop.arrive()
        if not loop.is_on_the_way:
            loop.at_epoch()
        loop.generators.start(keys.EPOCH, loop.progress.stretch)
        try:
            yield epoch
        except GeneratorExit:  # a `break`, or an exception in the script
            if not loop.closed:
                loop.progress.phase_left()
                _begin_between(loop)
            raise
        _end_epoch(loop, epoch, epoch_ends)
    loop.progress.phase_ends()
    _begin_between(loop)


def _end_epoch(loop: Loop, epoch: int, epoch_ends: Callable[[int], None]) -> None:
    if loop.is_on_the_way:
        loop.progress.epoch_ends()
        loop.arrive()
    else:
        epoch_ends(epoch)
        loop.progress.epoch_ends()
        loop.point()


def _begin_between(loop: Loop) -> None:
    loop.epochs = 0  # the next loop is in another phase, or in none
    loop.arrive()
    loop.generators.start(keys.EPOCH, loop.progress.stretch)
