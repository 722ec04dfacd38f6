"""Setting the random generators that users draw from: torch's, NumPy's and Python's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

_NUMPY_SEED_MASK = (1 << 32) - 1  # the legacy generator takes 32 bits


def set_key(key: int) -> None:
    """Start the global generators of torch (CPU, and CUDA once in use), NumPy and `random` at `key`."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)
    np.random.seed(key & _NUMPY_SEED_MASK)
    random.seed(key)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run the body; what surrounds it draws on as if nothing had been drawn."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class Stream:
    """A random state of its own, swapped in while a piece of user code runs.

    An iterable dataset draws at every item, between which the script draws as well: neither may
    disturb the other.
    """

    def __init__(self, key: int) -> None:
        with undisturbed():
            set_key(key)
            self._save()

    def _save(self) -> None:
        self._torch = torch.get_rng_state()
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the body on this stream; what surrounds it finds its own state again."""
        with undisturbed():
            torch.set_rng_state(self._torch)
            np.random.set_state(self._numpy)
            random.setstate(self._python)
            try:
                yield
            finally:
                self._save()


def generators() -> list[torch.Tensor]:
    """Return where torch's, NumPy's and Python's generators stand, for `set_generators`."""
    _, words, position, has_gauss, gauss = np.random.get_state()
    _, own, own_gauss = random.getstate()
    numpy = torch.tensor([*np.asarray(words).tolist(), position, has_gauss])
    spares = [gauss, 0.0 if own_gauss is None else own_gauss, float(own_gauss is not None)]
    python, rest = torch.tensor(own), torch.tensor(spares, dtype=torch.float64)
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), numpy, python, rest, *devices]


def set_generators(states: Sequence[torch.Tensor]) -> None:
    """Let the generators go on from where those of `generators()` stood, in another process perhaps."""
    cpu, numpy, python, rest, *devices = states
    torch.set_rng_state(cpu)
    *words, position, has_gauss = numpy.tolist()
    gauss, own_gauss, has_own = rest.tolist()
    key = np.array(words, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, gauss))
    random.setstate((3, tuple(python.tolist()), own_gauss if has_own else None))
    for state in devices:
        torch.cuda.set_rng_state(state)
