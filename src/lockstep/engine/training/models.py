"""`run.model`: check a module, place it, and wrap it with the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
from lockstep.errors import ModelError
from lockstep.registry import StrategyEntry, resolve
from lockstep.state.checkpoint.weights_only import check_fit


class Models:
    """The models of a run.

    Args:
        context: of the run.
        state: what the run has been told of; models are added to it.
        placed: called with each model when it is on its device.
    """

    def __init__(self, context: Context, state: State, placed: Callable[[nn.Module], None]) -> None:
        self._context, self._state, self._placed = context, state, placed
        self._tried = 0  # calls, since one that failed has left keys in the store
        servers, directory = context.settings.servers, context.record.directory
        self._servers = Servers(context.rendezvous, servers, directory, context.threads)

    def add(self, model: Any, keywords: Mapping[str, Any]) -> nn.Module:
        """Check, place and wrap `model`, a module or a list of them; return what the script is to call.

        Raises:
            ModelError: if it is no module, belongs to the run already, or differs between ranks.
            ExactnessError: for a setting that breaks the promise.
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
        self._placed(module)
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
        """Class of the run with its models."""
        return self._context.exactness(*(model.exactness for model in self._state.models))

    def load(self, model: nn.Module | None, weights: Mapping[str, torch.Tensor]) -> None:
        """Give a model of the run other weights.

        Raises:
            ModelError: if it is not clear which one is meant, or they don't fit it.
        """
        found = self.find(model)
        state = found.state()
        check_fit(type(found.module).__name__, state, weights)
        found.load({**state, **weights})

    def find(self, model: nn.Module | None) -> WrappedModel:
        """Return the wrapper of `model`, or of the only model there is.

        Raises:
            ModelError: if it is not clear which one is meant.
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
