"""Losses of batches that are computed again after a crash, compared with those from before it.

A state that was saved may lack something that the script keeps, such as a dropout probability that it
changed. Whatever it is, a batch that is computed again then has another loss. The launcher's memory has the
losses of each rank's last microbatches, and outlives the ranks.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from lockstep.engine.data.microbatch import Microbatch
from lockstep.state.checkpoint.shared_memory import LossRing
from lockstep.world import accelerator


class _Pending(NamedTuple):
    """A loss that is on its way from an accelerator."""

    microbatch: Microbatch
    points: int
    nth: int
    loss: torch.Tensor
    event: torch.Event


class Recomputed:
    """Records the losses of this rank, and compares those that were computed before.

    Args:
        ring: where this rank's losses go; read by its next generation.
        before: bits of losses by the key that `LossRing.key` gives, of earlier generations.
        warn: gives a line to the user.
    """

    def __init__(
        self, ring: LossRing, before: Mapping[int, int], warn: Callable[[str], None]
    ) -> None:
        self._ring, self._before, self._warn = ring, dict(before), warn
        self._last, self._nth = -1, 0
        self._pending: deque[_Pending] = deque()

    def saw(self, loss: torch.Tensor, points: int, microbatch: Microbatch) -> None:
        """Note the loss of a backward pass.

        Args:
            loss: the loss, on any device.
            points: points that the run has passed: the number of the batch in the run.
            microbatch: the microbatch that it belongs to.
        """
        key = LossRing.key(points, microbatch.replica, 0)
        self._nth = self._nth + 1 if key == self._last else 0
        self._last = key
        if not accelerator.holds(loss):
            self._note(loss, points, self._nth, microbatch)
            return
        event = torch.Event(loss.device)
        copy = loss.detach().to("cpu", non_blocking=True)
        event.record()
        self._pending.append(_Pending(microbatch, points, self._nth, copy, event))
        while (
            self._pending and self._pending[0].event.query()
        ):  # a wait would cost time in each step
            done = self._pending.popleft()
            self._note(done.loss, done.points, done.nth, done.microbatch)

    def _note(self, loss: torch.Tensor, points: int, nth: int, microbatch: Microbatch) -> None:
        key, value = LossRing.key(points, microbatch.replica, nth), loss.item()
        (bits,) = struct.unpack("q", struct.pack("d", value))
        self._ring.add(key, bits)
        if not self._before:
            return
        known = self._before.pop(key, bits)
        if known != bits:
            self._before.clear()  # once: what comes after it differs, too
            (old,) = struct.unpack("d", struct.pack("q", known))
            self._warn(
                f"lockstep: warning: batch {microbatch.step} of epoch {microbatch.epoch}, replica "
                f"{microbatch.replica}, was computed before the crash with the loss {old!r}, and now has "
                f"{value!r}: the script keeps something that the saved state lacks, and the result is not "
                "that of a run without a crash; hint: keep it in run.state(…), or pass it to run.register"
            )
