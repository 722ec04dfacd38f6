"""`run.model`: check a module, place it, and wrap it with the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.weights_only import check_fit
from lockstep.data.randomness import undisturbed
from lockstep.errors import ModelError
from lockstep.layout.classes import worst
from lockstep.parameter_server.servers import Servers
from lockstep.registry import STRATEGIES, StrategyEntry, resolve
from lockstep.strategies.checks import (
    as_module,
    check_same_models,
    refuse_unconverted,
)
from lockstep.strategies.ddp import spans_devices
from lockstep.strategies.options import split, taken_by
from lockstep.strategies.passes import refuse_changing
from lockstep.strategies.precision import REDUCED, autocast_forward
from lockstep.strategies.single import FrozenModel, is_trainable
from lockstep.strategies.sync_batchnorm import layers
from lockstep.strategies.versions import Versions
from lockstep.strategies.wrapped_model import WrappedModel
from lockstep.training.context import Context
from lockstep.training.state import State, check_savable


class Models:
    """The models of a run.

    Args:
        context: of the run.
        state: what the run has been told of; models are added to it.
    """

    def __init__(self, context: Context, state: State) -> None:
        self._context, self._state = context, state
        self._tried = 0  # models that were to be held: what failed has left notes for other ranks
        asked, directory = context.settings, context.record.directory
        self._servers = Servers(context.meeting, asked.servers, directory, context.threads)

    def add(self, model: Any, keywords: dict[str, Any]) -> nn.Module:
        """Check, place and hold `model`, a module or a list of them; return what the script is to call.

        Raises:
            ModelError: if it is no module, held already, or differs between ranks.
            ExactnessError: for a setting that breaks the promise.
        """
        module = as_module(model)
        strategy, keywords = self._check(module, keywords)
        self._place(module, strategy)
        # How a model is held must not change what the next one starts from.
        with undisturbed(), self._context.collectives.meeting("run.model"):
            held = self._hold(module, strategy, keywords)
        self._take(held)
        return held.wrapped

    def _check(
        self, module: nn.Module, keywords: dict[str, Any]
    ) -> tuple[StrategyEntry | None, dict[str, Any]]:
        """Return the strategy for a module, `None` for a frozen one, and the keywords that it takes."""
        asked = self._context.settings
        strategy, is_trained = STRATEGIES.find(asked.strategy), is_trainable(module)
        if any(module in (held.module, held.wrapped) for held in self._state.models):
            raise ModelError(f"this {type(module).__name__} belongs to the run already")
        refuse_unconverted(module)
        if self._context.replicas > 1:
            refuse_changing(module)
        spread, others = split(keywords)
        others = taken_by(strategy.name, others, exact=asked.exact, is_trained=is_trained)
        check = resolve(strategy.check)
        check(module, others, exact=asked.exact, device=self._context.device)
        extra = {k: v for k, v in module.state_dict().items() if not isinstance(v, torch.Tensor)}
        check_savable(type(module).__name__, extra)
        if not is_trained:
            return None, others
        if strategy.spreads and self._context.dims.mesh.model == 1:
            return STRATEGIES.find("ddp"), others
        return strategy, spread if strategy.spreads else others

    def _place(self, module: nn.Module, strategy: StrategyEntry | None) -> None:
        """Move a module to this rank's device, but for one whose parts are to stay where they are."""
        device, precision = self._context.device, self._context.settings.precision
        if not (strategy is not None and strategy.places) and not spans_devices(module):
            module.to(device)
        if precision in REDUCED:
            autocast_forward(module, device.type, REDUCED[precision])

    def _hold(
        self, module: nn.Module, strategy: StrategyEntry | None, keywords: dict[str, Any]
    ) -> WrappedModel:
        context = self._context
        number, self._tried = self._tried, self._tried + 1
        model_context = replace(context.of_model(number), servers=self._servers)
        if context.group is not None:
            world = context.world
            check_same_models(module, str(number), context.store, world.rank, world.size)
        if strategy is None:
            return FrozenModel(
                module, model_context.block, model_context.replicas, model_context.group, keywords
            )
        held: WrappedModel = resolve(strategy.hold)(module, model_context, keywords)
        held.exactness = worst([held.exactness, strategy.exactness])
        return held

    def _take(self, held: WrappedModel) -> None:
        context, asked, before = self._context, self._context.settings, self.exactness
        held.passes_in(context.passing)
        gathers = context.heartbeat.meeting("the gathering of parameters")
        held.gathers_in(gathers, context.gathering)
        held.meets_in(context.heartbeat.meeting("the exchange of buffers"))
        if asked.staleness and held.versions is None and held.parameters:
            held.versions = Versions(held.module, asked.staleness)
        parts = [layer.ranks.exactness for layer in layers(held.module)]
        held.exactness = worst([held.exactness, *parts])
        # DistributedDataParallel's; without effect, as gradients are summed once per global batch anyway.
        if not hasattr(held.wrapped, "no_sync"):
            held.wrapped.__dict__["no_sync"] = contextlib.nullcontext
        self._state.models.append(held)
        if self.exactness != before:  # what was said when the run began does not hold any more
            context.record.warn(
                f"lockstep: {asked.name}: {self.exactness}, "
                f"by how {type(held.module).__name__} is held"
            )

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
