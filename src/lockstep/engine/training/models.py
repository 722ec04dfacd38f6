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
from lockstep.engine.strategies.checks import as_module, check, check_same_models, spans_devices
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.precision import REDUCED, autocast_forward
from lockstep.engine.strategies.single import FrozenModel
from lockstep.engine.strategies.sync_batchnorm import layers
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.context import Context
from lockstep.errors import ModelError
from lockstep.registry import STRATEGIES, StrategyEntry, resolve
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
        self._tried = 0  # models that were to be held: what failed has left notes for other ranks
        asked, directory = context.settings, context.record.directory
        self._strategy = STRATEGIES.find(asked.strategy)
        self._servers = Servers(context.rendezvous, asked.servers, directory, context.threads)

    def add(self, model: Any, keywords: Mapping[str, Any]) -> nn.Module:
        """Check, place and hold `model`, a module or a list of them; return what the script is to call.

        Raises:
            ModelError: if it is no module, held already, or differs between ranks.
            ExactnessError: for a setting that breaks the promise.
        """
        module, before = as_module(model), self.exactness
        if any(module in (held.module, held.wrapped) for held in self._state.models):
            raise ModelError(f"this {type(module).__name__} belongs to the run already")
        context = self._context.of_model(self._tried, self._servers)
        over_ranks = self._context.dims.mesh.model > 1
        entry, own = check(module, keywords, self._strategy, context, over_ranks=over_ranks)
        extra = {k: v for k, v in module.state_dict().items() if not isinstance(v, torch.Tensor)}
        check_savable(type(module).__name__, extra)
        self._place(module, entry)
        self._placed(module)
        # How a model is held must not change what the next one starts from.
        with undisturbed(), self._context.collectives.collective("run.model"):
            self._tried += 1
            held = self._hold(module, entry, context, own)
        self._state.models.append(held)
        if self.exactness != before:  # what was said when the run began does not hold any more
            self._context.record.warn(
                f"lockstep: {self._context.settings.name}: {self.exactness}, "
                f"by how {type(module).__name__} is held"
            )
        return held.wrapped

    def _place(self, module: nn.Module, strategy: StrategyEntry | None) -> None:
        """Move a module to this rank's device, but for one whose parts are to stay where they are."""
        device, precision = self._context.device, self._context.settings.precision
        if not (strategy is not None and strategy.places) and not spans_devices(module):
            module.to(device)
        if precision in REDUCED:
            autocast_forward(module, device.type, REDUCED[precision])

    def _hold(
        self,
        module: nn.Module,
        strategy: StrategyEntry | None,
        context: ModelContext,
        keywords: dict[str, Any],
    ) -> WrappedModel:
        if self._context.group is not None:
            world = self._context.world
            check_same_models(module, str(context.number), context.store, world.rank, world.size)
        if strategy is None:
            held: WrappedModel = FrozenModel(module, context, keywords)
        else:
            held = resolve(strategy.hold)(module, context, keywords)
            held.exactness = worst([held.exactness, strategy.exactness])
        parts = [layer.ranks.exactness for layer in layers(module)]
        held.exactness = worst([held.exactness, *parts])
        # DistributedDataParallel's; without effect, as gradients are summed once per global batch anyway.
        if not hasattr(held.wrapped, "no_sync"):
            held.wrapped.__dict__["no_sync"] = contextlib.nullcontext
        return held

    @property
    def exactness(self) -> str:
        """Class of the run, with the models that it holds."""
        return self._context.exactness(*(model.exactness for model in self._state.models))

    def load(self, model: nn.Module | None, weights: Mapping[str, torch.Tensor]) -> None:
        """Give a model of the run other weights.

        Raises:
            ModelError: if it is not clear which one is meant, or they don't fit it.
        """
        held = self.find(model)
        state = held.state()
        check_fit(type(held.module).__name__, state, weights)
        held.load({**state, **weights})

    def find(self, model: nn.Module | None) -> WrappedModel:
        """Return what holds `model`, or the only model there is.

        Raises:
            ModelError: if it is not clear which one is meant.
        """
        held = self._state.models
        if model is None and len(held) == 1:
            return held[0]
        for candidate in held:
            if model is not None and model in (candidate.module, candidate.wrapped):
                return candidate
        raise ModelError(
            f"the run holds {len(held)} models; expected one of them to be named",
            hint="pass what run.model returned",
        )
