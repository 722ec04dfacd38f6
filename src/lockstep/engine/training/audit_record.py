"""`Record`: losses, gradients and optimizers' settings of one pass of a loop's body over a microbatch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.engine.data.description import checksum
from lockstep.engine.layout.audits import Values
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.tensor_bits import Bits, bits, read

#: The kinds of values that are compared, in the order of `Record.values`.
KINDS = ("losses", "gradients", "settings of optimizers")
#: Stands for the loss of a pass without a backward pass.
NO_LOSS = float("-inf")


@dataclass(slots=True)
class Record:
    """Losses, gradients and optimizer settings of one pass of a loop's body over a microbatch.

    An audit compares two such passes. Gradients are those of the microbatch, before ranks add them up.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    samples: int = 0  # checksum of the samples that the loader gave to the pass
    _settings: list[str] = field(default_factory=list)
    _gradients: dict[tuple[int, int, int], Bits] = field(default_factory=dict)

    @contextlib.contextmanager
    def backward(self, loss: torch.Tensor, models: Sequence[WrappedModel]) -> Iterator[None]:
        """Return a context whose body runs a backward pass; record its `loss` and gradients of `models`."""
        call = len(self.losses)
        self.losses.append(loss.detach().clone())
        handles = []
        for number, model in enumerate(models):
            own = {id(leaf): leaf for leaf in (*model.leaves, *model.parameters)}
            for place, leaf in enumerate(own.values()):
                if leaf.requires_grad and not leaf.is_meta:
                    keep = functools.partial(self._keep, (call, number, place))
                    handles.append(leaf.register_hook(keep))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, key: tuple[int, int, int], gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._gradients[key] = bits(gradient)

    def samples_are(self, data: Any) -> None:
        """Record a checksum of a microbatch's collated samples.

        It shows whether the loader gave both passes of an audit the same samples.
        """
        self.samples = _number(checksum(data))

    def step(self, optimizer: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Record the settings, such as the learning rate, of optimizer number `optimizer`.

        `groups`: the optimizer's parameter groups, whose entry `params` is left out.
        """
        rows = [
            sorted((name, _text(v)) for name, v in g.items() if name != "params") for g in groups
        ]
        self._settings.append(repr((optimizer, rows)))

    def values(self) -> Values:
        """Return a hash of 63 bits for each kind of recorded value, in the order of `KINDS`."""
        keys = sorted(self._gradients)
        hashes = read([bits(loss) for loss in self.losses] + [self._gradients[k] for k in keys])
        count = len(self.losses)
        gradients = list(zip(keys, hashes[count:], strict=True))
        return tuple(_number(part) for part in (hashes[:count], gradients, self._settings))

    def loss(self) -> float:
        """Return the sum of all recorded losses, for messages; `NO_LOSS` if no loss was recorded."""
        return float(sum(float(loss) for loss in self.losses)) if self.losses else NO_LOSS


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {read([bits(value)])[0]}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, np.generic):
        value = value.item()
    is_plain = isinstance(value, bool | int | float | complex | str | bytes | None)
    return repr(value) if is_plain else type(value).__name__


def _number(value: object) -> int:
    """Return a hash of `value` with 63 bits, which fits into a signed integer of 64 bits."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
