"""`StepHashes`: hashes of each step's gradients and parameters, which `lockstep replay` compares."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.recovery.state import State
from lockstep.engine.training.context import Context
from lockstep.engine.training.listeners import PointListener
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.tensor_bits import bits, read
from lockstep.state.checkpoint.parts import whole
from lockstep.state.record.steps import GRADIENTS, PARAMETERS, Value

#: Fraction of the steps' time that the step's two calls may take, and what they take if they hash nothing.
_PART, _CALLS = 0.008, 2e-6
#: Fraction that hashes may take where steps are so short that the calls take all of it.
_LEAST_PART = 0.001
#: Assumed seconds of a step until steps are measured.
_STEP = 0.1
#: Measured seconds per tensor, and per byte on one thread of a processor: an upper bound for accelerators.
_PER_TENSOR, _PER_BYTE = 3e-5, 4e-10
#: Steps between two hashes of models that are split over ranks, at least. Their tensors are gathered by all
#: ranks, so that the interval must not depend on the times that one rank measures.
_SPLIT = 64


class StepHashes(PointListener):
    """Hashes gradients before, and parameters and buffers after every `every`-th step.

    Args:
        every: number of steps between two hashes; `None` for the smallest power of two at which
            hashing costs less than 1 % of the measured time.
        is_main: whether this rank records hashes; other ranks only take part in gathering sharded
            tensors.
        add: function that records a hash; its arguments are the step, the kind of the hash, and a
            function that returns the hash.
    """

    def __init__(
        self,
        loop: Loop,
        state: State,
        every: int | None,
        add: Callable[[int, int, Value], None],
        *,
        is_main: bool,
    ) -> None:
        self._loop, self._state, self._every, self._add = loop, state, every, add
        self._is_main = is_main
        self._chosen = 0  # steps between two hashes, if `every` is `None`; 0 before the first step
        self._next = 0  # no step before this one is hashed
        self._newest = 0, 0.0  # step and time of the newest hash of parameters
        self._seconds = 0.0  # seconds that its step's hashes took

    @staticmethod
    def of(context: Context, loop: Loop, state: State) -> StepHashes | None:
        """Return the listener that adds hashes to the run's step record; `None` if the run keeps none."""
        steps, every = context.record.steps, context.settings.hash_every
        if steps is None:
            return None
        return StepHashes(loop, state, every, steps.add, is_main=context.world.is_main)

    def update_begins(self, optimizer: Optimizer) -> None:
        """Hash the gradients just before an optimizer's update if this is an `every`-th step."""
        step = self._loop.steps + 1
        if step < self._next or not self._is_due(step):
            return
        began = time.monotonic()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = {str(n): p.grad for n, p in enumerate(parameters) if p.grad is not None}
        self._hash(step, GRADIENTS, grads)
        self._seconds += time.monotonic() - began

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Hash parameters and buffers if `step` is a multiple of the interval between hashes.

        If the user has not set the interval, it may then be adapted to the measured time of steps. Nothing
        is hashed while each rank has parameters of its own.
        """
        if step < self._next or not self._is_due(step):
            return
        began = time.monotonic()
        states = [model.state() for model in self._state.models]
        values = {f"{n}.{name}": v for n, own in enumerate(states) for name, v in own.items()}
        self._hash(step, PARAMETERS, {k: v for k, v in values.items() if torch.is_tensor(v)})
        if self._every is None and not self._state.is_split:
            self._seconds += time.monotonic() - began
            before, newest = self._newest
            if before:
                self._chosen = self._interval((began - newest) / (step - before))
            self._newest, self._seconds = (step, time.monotonic()), 0.0

    def _is_due(self, step: int) -> bool:
        if not self._chosen:
            self._chosen = self._every or self._interval(_STEP)
        if rest := step % self._chosen:
            self._next = step - rest + self._chosen
            return False
        # Models that step locally have parameters of their own on each rank, until ranks average them.
        return not any(model.steps_locally for model in self._state.models)

    def _interval(self, step: float) -> int:
        """Return the number of steps between two hashes, a power of two; `step`: seconds of a step.

        With powers of two, two runs of unequal speed hash many of the same steps, which can be compared.
        """
        parameters = [p for model in self._state.models for p in model.parameters]
        seconds = max(cost(parameters), self._seconds)
        budget = max(_PART * step - _CALLS, _LEAST_PART * step)
        interval = 1 << max(0, math.ceil(seconds / budget) - 1).bit_length()
        return max(interval, _SPLIT if self._state.is_split else 1)

    def _hash(self, step: int, kind: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._is_main or self._state.is_split:
            value = hash64(tensors)
            if self._is_main:
                self._add(step, kind, value)


def cost(parameters: Sequence[torch.Tensor]) -> float:
    """Return an upper bound of the seconds that hashing a step's gradients and parameters takes."""
    size = sum(p.numel() * p.element_size() for p in parameters)
    return 2 * (_PER_TENSOR * len(parameters) + _PER_BYTE * size)


def hash64(tensors: Mapping[str, torch.Tensor]) -> Callable[[], bytes]:
    """Return a function that returns an 8-byte hash of the names, types, shapes and bits of `tensors`.

    Devices compute the hash asynchronously; the returned function waits for them. Tensors that are sharded
    over ranks are gathered, by a collective call.
    """
    names = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    hashes = [bits(whole(tensor)) for tensor in tensors.values()]

    def value() -> bytes:
        text = json.dumps([names, read(hashes)])
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    return value
