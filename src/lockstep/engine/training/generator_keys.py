"""`GeneratorKeys`: where the global random generators start in each part of a run."""

from __future__ import annotations

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys


class GeneratorKeys:
    """Starts the generators at keys of what is computed, which follow from the run's seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._key: int | None = None
        self.passed: Microbatch | None = None

    def start(self, purpose: str, *numbers: int) -> None:
        """Start all generators at a key."""
        self.set(keys.derive(self._seed, purpose, *numbers))

    def set(self, key: int) -> None:
        """Start all generators at `key`."""
        self._key = key
        set_key(key)

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Start all generators at the key of a microbatch."""
        set_key(keys.derive(self._seed, keys.FORWARD, *microbatch.numbers, microbatch.turn))

    def pass_ends(self, microbatch: Microbatch, *, shown: bool) -> None:
        """End a pass, of which `microbatch` was the last."""
        self.passed, self._key = microbatch, None
        if shown:  # else nothing draws until the next microbatch, or the end of the loop
            self.set(self._after(microbatch))

    @property
    def key(self) -> int | None:
        """Key at which generators start outside of microbatches, after the last pass."""
        if self._key is None and self.passed is not None:
            self._key = self._after(self.passed)
        return self._key

    def of_step(self, purpose: str, step: int, *numbers: int) -> int:
        """Return the key of what is drawn once for a step, on all ranks alike."""
        return keys.derive(self._seed, purpose, step, *numbers)

    def _after(self, microbatch: Microbatch) -> int:
        """Return the key after a pass, of which `microbatch` was the last."""
        return keys.derive(self._seed, keys.BETWEEN, *microbatch.numbers[:-1], microbatch.turn)
