"""`Models`, behind `run.model`: checks a module, moves it to the device, wraps it for its strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.engine.data.randomness import undisturbed
from lockstep.engine.layout.classes import worst
from lockstep.engine.parameter_server.servers import Servers
from lockstep.engine.recovery.state import State, check_savable
from lockstep.engine.strategies.checks import (
    as_module,
    check,
    check_same_models,
    is_trainable,
    spans_devices,
)
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.precision import REDUCED, autocast_forward
from lockstep.engine.strategies.single import FrozenModel
from lockstep.engine.strategies.sync_batchnorm import layers
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.context import Context
from lockstep.engine.training.faults import Faults
from lockstep.errors import ModelError
from lockstep.registry import StrategyEntry, resolve
from lockstep.state.checkpoint.weights_only import check_fit
from lockstep.world import accelerator


class Models:
    """The models of a run: wraps each module for the run's strategy, and adds it to the saved state."""

    def __init__(self, context: Context, state: State, faults: Faults | None = None) -> None:
        self._context, self._state, self._faults = context, state, faults
        self._tried = 0  # number of calls; a failed one counts, as it has left keys in the store
        asked, directory = context.settings, context.record.directory
        self._servers = Servers(context.rendezvous, asked.servers, directory, context.threads)

    def add(self, model: Any, keywords: Mapping[str, Any]) -> nn.Module:
        """Check `model` (a module or a list), move and wrap it; return the module that the script calls.

        Raises:
            ModelError: if `model` is no module, belongs to the run already, or differs between ranks.
            ExactnessError: if a setting makes the result depend on the layout.
        """
        module, before = as_module(model), self.exactness
        if any(module in (known.module, known.wrapped) for known in self._state.models):
            raise ModelError(f"this {type(module).__name__} belongs to the run already")
        context = self._context.of_model(self._tried, self._servers)
        strategy = self._context.strategy
        own = check(module, keywords, self._context.settings.strategy, strategy, context)
        extra = {k: v for k, v in module.state_dict().items() if not isinstance(v, torch.Tensor)}
        check_savable(type(module).__name__, extra)
        self._place(module)
        if self._faults is not None:
            self._faults.damage(module)
        # Random numbers that a strategy draws must not change the initial weights of the next model.
        with undisturbed(), self._context.collectives.collective("run.model"):
            self._tried += 1
            wrapped = self._wrap(module, strategy, context, own)
        self._state.models.append(wrapped)
        if self.exactness != before:  # the class that was printed when the run began
            self._context.record.warn(
                f"lockstep: {self._context.settings.name}: {self.exactness}, "
                f"by how {type(module).__name__} is wrapped"
            )
        return wrapped.wrapped

    def _place(self, module: nn.Module) -> None:
        """Move `module` to this rank's device; for `bf16` and `fp16` also set up autocast.

        The module is not moved if the strategy moves it, or if it is on several GPUs already.
        """
        device, precision = self._context.device, self._context.settings.precision
        by_strategy = self._context.strategy.places and is_trainable(module)
        if not by_strategy and not spans_devices(module):
            accelerator.move(module, device)
        if precision in REDUCED:
            autocast_forward(module, device.type, REDUCED[precision])

    def _wrap(
        self,
        module: nn.Module,
        strategy: StrategyEntry,
        context: ModelContext,
        keywords: dict[str, Any],
    ) -> WrappedModel:
        if self._context.group is not None:
            world = self._context.world
            check_same_models(module, str(context.number), context.store, world.rank, world.size)
        wrap = resolve(strategy.wrap) if is_trainable(module) else FrozenModel
        model: WrappedModel = wrap(module, context, keywords)
        parts = [layer.ranks.exactness for layer in layers(module)]
        model.exactness = worst([model.exactness, *parts])
        # As in DistributedDataParallel, but without effect: gradients are summed once per global batch.
        if not hasattr(model.wrapped, "no_sync"):
            model.wrapped.__dict__["no_sync"] = contextlib.nullcontext
        return model

    @property
    def exactness(self) -> str:
        """Class of exactness of the run with its models: `exact`, `close` or `approximate`."""
        return self._context.exactness(*(model.exactness for model in self._state.models))

    def load(self, model: nn.Module | None, weights: Mapping[str, torch.Tensor]) -> None:
        """Load `weights`, tensors by name, into `model`; `None` is the run's only model.

        Raises:
            ModelError: if `model` does not belong to the run, or the weights don't fit it.
        """
        wrapped = self.find(model)
        state = wrapped.state()
        check_fit(type(wrapped.module).__name__, state, weights)
        wrapped.load({**state, **weights})

    def find(self, model: nn.Module | None) -> WrappedModel:
        """Return the wrapper of the module `model`; for `None`, that of the run's only model.

        Raises:
            ModelError: if `model` does not belong to the run, or is `None` and the run has several models.
        """
        models = self._state.models
        if model is None and len(models) == 1:
            return models[0]
        for candidate in models:
            if model is not None and model in (candidate.module, candidate.wrapped):
                return candidate
        raise ModelError(
            f"the run holds {len(models)} models; expected one of them to be named",
            hint="pass what run.model returned",
        )
