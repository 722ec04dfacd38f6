"""`TracedStep`: in a replay, hashes of each module's inputs and outputs in one step.

`lockstep diff` compares them between two replays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.step_hashes import hash64


class TracedStep:
    """Writes hashes of one step as lines of JSON: parameters and buffers before, then module calls.

    The line of a module call has hashes of its inputs and outputs.
    """

    def __init__(self, path: Path, models: Sequence[WrappedModel]) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._models = models
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._microbatch: Microbatch | None = None

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Set the microbatch to which module calls belong from now on.

        Before the first microbatch, hash parameters and buffers, and register hooks on all modules.
        """
        is_first, self._microbatch = self._microbatch is None, microbatch
        for n, model in enumerate(self._models if is_first else ()):
            of_model = f"model {n}: " if len(self._models) > 1 else ""
            for name, value in model.state().items():
                if torch.is_tensor(value):
                    self._write(of="parameter", name=of_model + name, bits=_hash(value))
            for name, module in model.module.named_modules():
                hook = partial(self._called, of_model + name)
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def step_ends(self) -> None:
        """Remove the hooks from all modules, and close the file."""
        for hook in self._hooks:
            hook.remove()
        self._file.close()

    def _called(
        self, name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any
    ) -> None:
        assert self._microbatch is not None, "the hooks are set in a microbatch"
        replica, size = self._microbatch.replica, self._microbatch.size
        kind = {"name": name, "class": type(module).__name__, "replica": replica}
        self._write(
            **kind, of="call", input=_hashes((args, kwargs), size), output=_hashes(output, size)
        )

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")


def _hashes(value: Any, size: int) -> list[str]:
    """Return a hash of all tensors in `value`, then one for each row of the first tensor with `size` rows.

    `size`: number of samples in the microbatch, so that a row belongs to a sample.
    """
    tensors = [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf)]
    rows = next((tensor for tensor in tensors if tensor.shape[:1] == (size,)), ())
    return [_hash(*tensors), *map(_hash, rows)]


def _hash(*tensors: torch.Tensor) -> str:
    return hash64({str(n): tensor for n, tensor in enumerate(tensors)})().hex()
