"""Seeding, saving and restoring of the global random generators of torch, NumPy and Python."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.world import accelerator

_NUMPY_SEED_MASK = (1 << 32) - 1  # the legacy generator takes 32 bits


def set_key(key: int) -> None:
    """Seed the global generators of torch, NumPy and `random` with `key`.

    The generators of an accelerator are seeded only if the accelerator is in use.
    """
    torch.default_generator.manual_seed(key)
    if accelerator.is_initialized():
        accelerator.module().manual_seed_all(key)
    np.random.seed(key & _NUMPY_SEED_MASK)
    random.seed(key)


def _states() -> tuple[Any, ...]:
    """Return the states of the global generators of torch, NumPy and Python, and of accelerators in use."""
    devices = accelerator.module().get_rng_state_all() if accelerator.is_initialized() else []
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), devices


def _restore(states: tuple[Any, ...]) -> None:
    cpu, numpy, python, devices = states
    torch.set_rng_state(cpu)
    np.random.set_state(numpy)
    random.setstate(python)
    if devices:
        accelerator.module().set_rng_state_all(devices)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Return a context manager that saves the states of the global random generators and restores them.

    They are saved at the beginning and restored at the end.
    """
    states = _states()
    try:
        yield
    finally:
        _restore(states)


class Stream:
    """A stream of random numbers for one part of the user's code, separate from all other code.

    It is a state of the global random generators, set only while that code runs. An iterable dataset draws
    random numbers for every item, and the script draws between items. With a `Stream` for the dataset,
    neither changes the random numbers of the other.
    """

    def __init__(self, key: int) -> None:
        with undisturbed():
            set_key(key)
            self._states = _states()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Return a context manager inside of which the global random generators draw from this stream.

        At its end they are set back to the states before it.
        """
        with undisturbed():
            _restore(self._states)
            try:
                yield
            finally:
                self._states = _states()


#: States of the generators of torch, NumPy, Python and the device, for another process; `None` for a
#: generator whose state has not changed. Text instead of tensors, since states are sent in the header of a
#: message, without a copy from a device.
States = list[str | None]


@dataclass(frozen=True, slots=True)
class Generators:
    """States of the global generators of torch, NumPy, Python and the device."""

    cpu: torch.Tensor
    numpy: Any
    python: Any
    device: torch.Tensor | None

    @staticmethod
    def now() -> Generators:
        """Return the current states of the global generators."""
        device = accelerator.module().get_rng_state() if accelerator.is_initialized() else None
        return Generators(torch.get_rng_state(), np.random.get_state(), random.getstate(), device)

    def since(self, before: Generators) -> States | None:
        """Return, as text, the states of those generators that have drawn numbers since `before`.

        `before`: an earlier result of `now`. The result is `None` if no generator has drawn any.
        """
        states: States = [None] * 4
        if not torch.equal(self.cpu, before.cpu):
            states[0] = _text(self.cpu)
        name, words, *rest = self.numpy
        if not np.array_equal(words, before.numpy[1]) or rest != list(before.numpy[2:]):
            states[1] = json.dumps([name, np.asarray(words).tolist(), *rest])
        if self.python != before.python:
            states[2] = json.dumps(self.python)
        if self.device is not None and before.device is not None:
            moved = not torch.equal(self.device, before.device)
            states[3] = _text(self.device) if moved else None
        return None if all(state is None for state in states) else states


def set_generators(states: States) -> None:
    """Set the global generators to `states`; `None` in it leaves a generator unchanged."""
    cpu, numpy, python, device = states
    if cpu is not None:
        torch.set_rng_state(_bytes(cpu))
    if numpy is not None:
        name, words, *rest = json.loads(numpy)
        np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
    if python is not None:
        version, own, spare = json.loads(python)
        random.setstate((version, tuple(own), spare))
    if device is not None:
        accelerator.module().set_rng_state(_bytes(device))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
