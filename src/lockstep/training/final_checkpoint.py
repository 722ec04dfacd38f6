"""What a run leaves on disk when it ends, so that a script with other runs after it comes past it fast."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from lockstep.checkpoint.disk import Checkpoints
from lockstep.checkpoint.position import Position
from lockstep.checkpoint.snapshot import Snapshots
from lockstep.errors import CheckpointError

#: Seconds after which a run is worth it, unless checkpoints are closer together.
_LONG = 60.0


class FinalCheckpoint:
    """Writes the newest snapshot to disk when a long run is done: the main rank does so by itself.

    It is a state from which the rest of the script follows as it did. What a script has at its very end
    would not be: code after the last epoch would act on it a second time.

    Args:
        snapshots: the memory that the next run takes over.
        checkpoints: of the run, as if this rank were its only one.
        every: seconds between checkpoints; 0 for none.
        is_resumed: whether the run went on from a state, which says that it takes long.
        warn: tells the user what must not be missed.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        checkpoints: Checkpoints,
        *,
        every: float,
        is_resumed: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._snapshots, self._checkpoints = snapshots, checkpoints
        self._every, self._is_resumed, self._warn = every, is_resumed, warn
        self._began = time.monotonic()

    def save(self) -> None:
        """Write it, if the run was long and the disk has nothing as new."""
        if not self._is_long:
            return
        try:
            self._save()
        except CheckpointError as error:
            self._warn(
                f"lockstep: warning: the end of the run is not on disk: {error.message}: where a later "
                "run of this script is interrupted, this one is computed again from an older state"
            )
        finally:
            self._checkpoints.close()

    @property
    def _is_long(self) -> bool:
        lasted = time.monotonic() - self._began
        return self._every > 0 and (self._is_resumed or lasted > min(self._every, _LONG))

    def _save(self) -> None:
        newest, there = self._snapshots.newest(), self._checkpoints.newest_text()
        if newest is None or not newest.is_whole:
            return
        step = _step(newest.text)
        if there is None or _step(there) < step:
            self._checkpoints.save(step, newest.tensors, newest.text, best=None, steady=True)
            self._checkpoints.wait()


def _step(text: str) -> int:
    return Position.parse(json.loads(text)["position"]).steps
