"""`run.model`: check a module, place it, and wrap it with the strategy."""

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


class Models:
    """Wraps modules for the strategy, and adds them to the run's state."""

    def __init__(self, context: Context, state: State, faults: Faults | None = None) -> None:
        self._context, self._state, self._faults = context, state, faults
        self._tried = (
            0  # models that were to be wrapped: a failed one has left notes for other ranks
        )
        asked, directory = context.settings, context.record.directory
        self._servers = Servers(context.rendezvous, asked.servers, directory, context.threads)

    def add(self, model: Any, keywords: Mapping[str, Any]) -> nn.Module:
        """Check, place and wrap `model`, a module or a list of them; return the module to be called.

        Raises:
            ModelError: if it is no module, part of the run already, or differs between ranks.
            ExactnessError: for a setting that makes the result depend on the layout.
        """
        module, before = as_module(model), self.exactness
        if any(module in (known.module, known.wrapped) for known in self._state.models):
            raise ModelError(f"this {type(module).__name__} belongs to the run already")
        context, strategy = (
            self._context.of_model(self._tried, self._servers),
            self._context.strategy,
        )
        own = check(module, keywords, self._context.settings.strategy, strategy, context)
        extra = {k: v for k, v in module.state_dict().items() if not isinstance(v, torch.Tensor)}
        check_savable(type(module).__name__, extra)
        self._place(module)
        if self._faults is not None:
            self._faults.damage(module)
        # What a strategy draws must not change what the next model starts from.
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
        """Move a module to this rank's device, but for one whose parts are to stay where they are."""
        device, precision = self._context.device, self._context.settings.precision
        by_strategy = self._context.strategy.places and is_trainable(module)
        if not by_strategy and not spans_devices(module):
            module.to(device)
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
        # DistributedDataParallel's; without effect, as gradients are summed once per global batch anyway.
        if not hasattr(model.wrapped, "no_sync"):
            model.wrapped.__dict__["no_sync"] = contextlib.nullcontext
        return model

    @property
    def exactness(self) -> str:
        """Class of exactness of the run, with its models."""
        return self._context.exactness(*(model.exactness for model in self._state.models))

    def load(self, model: nn.Module | None, weights: Mapping[str, torch.Tensor]) -> None:
        """Load weights into a model of the run.

        Raises:
            ModelError: if `model` is none of the run's, or the weights don't fit it.
        """
        wrapped = self.find(model)
        state = wrapped.state()
        check_fit(type(wrapped.module).__name__, state, weights)
        wrapped.load({**state, **weights})

    def find(self, model: nn.Module | None) -> WrappedModel:
        """Return the wrapped `model`, by default the only one.

        Raises:
            ModelError: if `model` is none of the run's, or missing and there are several.
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
