"""`StepHashes`: hashes of gradients and parameters after steps, for the step record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

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

#: Seconds that hashes may take per step: less than 1 % of a step of 100 ms, as losses are recorded, too.
_SECONDS = 0.8e-3
#: Measured seconds per tensor, and per byte on one thread of a processor: an upper bound for accelerators.
_PER_TENSOR, _PER_BYTE = 3e-5, 4e-10


class StepHashes(PointListener):
    """Hashes the gradients before, and the parameters and buffers after every `every`-th step.

    Args:
        every: `None` for the shortest interval that costs less than 1 % of steps of 100 ms.
        is_main: whether this rank records; the other ranks only gather tensors that are cut over ranks.
        add: records a hash: step, kind, function that returns the hash.
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
        self._models = 0  # number of models for which `_chosen` was computed
        self._chosen = 1

    @staticmethod
    def of(context: Context, loop: Loop, state: State) -> StepHashes | None:
        """Return the listener of a run; `None` if the run keeps no step record."""
        steps, every = context.record.steps, context.settings.hash_every
        if steps is None:
            return None
        return StepHashes(loop, state, every, steps.add, is_main=context.world.is_main)

    def update_begins(self, optimizer: Optimizer) -> None:
        """Hash the gradients just before an optimizer's update if this is an `every`-th step."""
        if self._is_due(self._loop.steps + 1):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            grads = {str(n): p.grad for n, p in enumerate(parameters) if p.grad is not None}
            self._hash(self._loop.steps + 1, GRADIENTS, grads)

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Hash parameters and buffers if this is an `every`-th step."""
        if self._is_due(step):
            states = [model.state() for model in self._state.models]
            values = {f"{n}.{name}": v for n, own in enumerate(states) for name, v in own.items()}
            self._hash(step, PARAMETERS, {k: v for k, v in values.items() if torch.is_tensor(v)})

    def _is_due(self, step: int) -> bool:
        models = self._state.models
        if any(model.steps_locally for model in models):
            return False  # each rank has its own parameters, until ranks average them
        if self._every is not None:
            return step % self._every == 0
        if self._models != len(models):
            self._models = len(models)
            self._chosen = interval([p for model in models for p in model.parameters])
        return step % self._chosen == 0

    def _hash(self, step: int, kind: int, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._is_main or self._state.is_split:
            value = hash64(tensors)
            if self._is_main:
                self._add(step, kind, value)


def interval(parameters: list[torch.Tensor]) -> int:
    """Return the number of steps between two hashes: a power of two that follows from a model's size."""
    size = sum(p.numel() * p.element_size() for p in parameters)
    seconds = 2 * (_PER_TENSOR * len(parameters) + _PER_BYTE * size)
    return 1 << max(0, int(seconds / _SECONDS)).bit_length()


def hash64(tensors: Mapping[str, torch.Tensor]) -> Value:
    """Return a function that returns a hash of 8 bytes of names, types, shapes and bits of tensors.

    Devices compute meanwhile; the function waits for them. A tensor that is cut over ranks is gathered.
    """
    names = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    hashes = [bits(whole(tensor)) for tensor in tensors.values()]

    def value() -> bytes:
        text = json.dumps([names, read(hashes)])
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    return value
