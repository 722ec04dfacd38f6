"""The generator behind `run.epochs`: it yields the epochs that are left in a new or resumed run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from lockstep.engine.data.loader import observed
from lockstep.engine.layout import keys
from lockstep.engine.training.loop import Loop


def epochs_left(loop: Loop, count: int, epoch_ends: Callable[[int], None]) -> Iterator[int]:
    """Yield the epochs that a call of `run.epochs`, with `count` epochs, still has to run.

    `epoch_ends` is called with an epoch's number at its end, but not for epochs that a resumed run repeats.
    """
    return observed(_epochs(loop, count, epoch_ends), loop)


def _epochs(loop: Loop, count: int, epoch_ends: Callable[[int], None]) -> Generator[int]:
    progress = loop.progress
    loop.first_error.check()
    loop.epochs, loop.phases = count, loop.phases + 1
    loop.approach()
    for epoch in progress.phase_begins(count):
        loop.epoch_begins(epoch)
        try:
            yield epoch
        except GeneratorExit:  # a `break`, or an exception in the script
            if not loop.closed:
                progress.phase_left()
                _phase_is_over(loop)
            raise
        if loop.is_replaying:
            progress.epoch_ends()
            loop.arrive()
        else:
            epoch_ends(epoch)
            progress.epoch_ends()
            loop.point()
    progress.phase_ends()
    _phase_is_over(loop)


def _phase_is_over(loop: Loop) -> None:
    loop.epochs = 0  # the next loop is in another phase, or in none
    loop.arrive()
    loop.generators.start(keys.EPOCH, loop.progress.stretch)
