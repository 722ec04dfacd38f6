"""`GeneratorKeys`: sets the global random generators before each epoch, batch, microbatch and step."""

from __future__ import annotations

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys


class GeneratorKeys:
    """Sets the random generators of torch, NumPy and Python to keys.

    A key is a number computed from the run's seed and the numbers of the epoch, batch and replica.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._key: int | None = None
        self.passed: Microbatch | None = None

    def derive(self, purpose: str, *numbers: int) -> int:
        """Return the key that follows from the run's seed and the arguments, the same on all ranks.

        `purpose`: one of the constants in `engine/layout/keys.py`. `numbers`: numbers of what is computed,
        such as epoch, batch and replica.
        """
        return keys.derive(self._seed, purpose, *numbers)

    def start(self, purpose: str, *numbers: int) -> None:
        """Seed all random generators with the key that `derive` returns for the arguments."""
        self.set(self.derive(purpose, *numbers))

    def set(self, key: int) -> None:
        """Set the random generators of torch, NumPy and Python to `key`."""
        self._key = key
        set_key(key)

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Set all random generators to the key of a microbatch, before the loop's body computes it."""
        set_key(keys.derive(self._seed, keys.FORWARD, *microbatch.numbers, microbatch.turn))

    def pass_ends(self, microbatch: Microbatch, *, shown: bool) -> None:
        """Record the end of an iteration over a global batch; `microbatch` was its last microbatch.

        `shown`: whether the script iterates over `run.batches`. Then its code may draw random numbers
        before the next iteration, and the generators are set for this code.
        """
        self.passed, self._key = microbatch, None
        if shown:  # else the script draws nothing before the next microbatch or the end of the loop
            self.set(self._after(microbatch))

    @property
    def key(self) -> int | None:
        """Seed of the random generators for the script's code after the latest global batch.

        It is `None` before the first global batch.
        """
        if self._key is None and self.passed is not None:
            self._key = self._after(self.passed)
        return self._key

    def _after(self, microbatch: Microbatch) -> int:
        """Return the key for the script's code that follows an iteration over a global batch.

        `microbatch`: the last microbatch of this iteration.
        """
        return self.derive(keys.BETWEEN, *microbatch.numbers[:-1], microbatch.turn)
