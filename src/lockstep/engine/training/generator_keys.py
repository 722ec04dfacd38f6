"""`GeneratorKeys`: sets the global random generators at the beginning of each part of a run."""

from __future__ import annotations

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys


class GeneratorKeys:
    """Sets the random generators of torch, NumPy and Python to keys.

    A key is a number that follows from the run's seed and the numbers of the epoch, batch and replica.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._key: int | None = None
        self.passed: Microbatch | None = None

    def start(self, purpose: str, *numbers: int) -> None:
        """Set all generators to the key of `purpose` (see `engine/layout/keys.py`) and `numbers`."""
        self.set(keys.derive(self._seed, purpose, *numbers))

    def set(self, key: int) -> None:
        """Set all generators to `key`."""
        self._key = key
        set_key(key)

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Set all generators to the key of a microbatch, before its forward pass."""
        set_key(keys.derive(self._seed, keys.FORWARD, *microbatch.numbers, microbatch.turn))

    def pass_ends(self, microbatch: Microbatch, *, shown: bool) -> None:
        """End an iteration over a global batch, of which `microbatch` was the last microbatch."""
        self.passed, self._key = microbatch, None
        if shown:  # else the script draws nothing before the next microbatch or the end of the loop
            self.set(self._after(microbatch))

    @property
    def key(self) -> int | None:
        """Key that seeds the generators for the script's code after a global batch."""
        if self._key is None and self.passed is not None:
            self._key = self._after(self.passed)
        return self._key

    def of_step(self, purpose: str, step: int, *numbers: int) -> int:
        """Return the key for random numbers that all ranks draw alike in a step, as an optimizer may."""
        return keys.derive(self._seed, purpose, step, *numbers)

    def _after(self, microbatch: Microbatch) -> int:
        """Return the key for code after an iteration whose last microbatch was `microbatch`."""
        return keys.derive(self._seed, keys.BETWEEN, *microbatch.numbers[:-1], microbatch.turn)
