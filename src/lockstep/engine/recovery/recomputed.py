"""`RecomputedLosses`: compares losses of batches computed again after a crash with those before the crash.

The launcher keeps the losses of each rank's last microbatches in shared memory, which outlives the ranks. A
batch that is computed again has another loss if the saved state lacks a value that the script has
changed, such as a dropout probability.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping

import torch

from lockstep.engine.data.microbatch import Microbatch
from lockstep.state.checkpoint.shared_memory import LossRing
from lockstep.world import accelerator


class RecomputedLosses:
    """Records the losses of this rank, and warns if a loss differs from its value before the crash.

    Args:
        ring: shared memory for this rank's losses, which the rank reads after a restart.
        before: losses before the crash, as the bits of a double; the keys are those of `LossRing.key`.
        warn: function that shows a line to the user.
    """

    def __init__(
        self, ring: LossRing, before: Mapping[int, int], warn: Callable[[str], None]
    ) -> None:
        self._ring, self._before, self._warn = ring, dict(before), warn
        self._last, self._nth = -1, 0
        # Copies of losses that an accelerator has not finished yet.
        self._pending: deque[tuple[torch.Event, torch.Tensor, int, Microbatch]] = deque()

    def saw(self, loss: torch.Tensor, points: int, microbatch: Microbatch) -> None:
        """Record the loss of a backward pass; warn if it differs from its value before a crash.

        `points`: number of batches and epochs completed before. A loss on an accelerator is recorded later,
        when its copy to the CPU is complete.
        """
        first = self._ring.key(points, microbatch.replica, 0)
        self._nth = self._nth + 1 if first == self._last else 0
        self._last, key = first, self._ring.key(points, microbatch.replica, self._nth)
        if not accelerator.holds(loss):
            self._note(loss, key, microbatch)
            return
        event = torch.Event(loss.device)
        copy = loss.detach().to("cpu", non_blocking=True)
        event.record()
        self._pending.append((event, copy, key, microbatch))
        while self._pending and self._pending[0][0].query():  # a wait would slow each step
            self._note(*self._pending.popleft()[1:])

    def _note(self, loss: torch.Tensor, key: int, microbatch: Microbatch) -> None:
        value = loss.item()
        (bits,) = struct.unpack("q", struct.pack("d", value))
        self._ring.add(key, bits)
        known = self._before.pop(key, bits)
        if known != bits:
            self._before.clear()  # one warning: later losses differ, too
            (old,) = struct.unpack("d", struct.pack("q", known))
            self._warn(
                f"lockstep: warning: batch {microbatch.step} of epoch {microbatch.epoch}, replica "
                f"{microbatch.replica}, was computed before the crash with the loss {old!r}, and now has "
                f"{value!r}: the script keeps something that the saved state lacks, and the result is not "
                "that of a run without a crash; hint: keep it in run.state(…), or pass it to run.register"
            )
