"""Taking models into a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.weights_only import check_fit
from lockstep.data.randomness import undisturbed
from lockstep.errors import ModelError
from lockstep.exchange.links import connect
from lockstep.layout.classes import worst
from lockstep.registry import STRATEGIES, resolve
from lockstep.strategies.checks import (
    as_module,
    check_same_models,
    refuse_unconverted,
)
from lockstep.strategies.ddp import spans_devices
from lockstep.strategies.frozen import FrozenModel, is_trainable
from lockstep.strategies.model_context import ModelContext
from lockstep.strategies.options import split, taken_by
from lockstep.strategies.passes import refuse_changing
from lockstep.strategies.precision import REDUCED, autocast_forward
from lockstep.strategies.ps import hold_served
from lockstep.strategies.remote import hold_remotely
from lockstep.strategies.sync_batchnorm import layers
from lockstep.strategies.versions import Versions
from lockstep.strategies.wrapped_model import WrappedModel
from lockstep.training.serving import Serving
from lockstep.training.session import Session
from lockstep.training.state import check_savable


class Models:
    """The models of a run.

    Args:
        session: the run's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tried = 0  # models that were to be held: what failed has left notes for other ranks
        self._is_served = False  # whether a model has connections to servers
        self._serving: Serving | None = None

    def add(self, model: Any, settings: dict[str, Any]) -> nn.Module:
        """Place and hold `model`, a module or a list of them, and return what the script is to call.

        Raises:
            ModelError: if it is no module, held already, or differs between ranks.
            ExactnessError: for a setting that breaks the promise.
        """
        session = self._session
        module = as_module(model)
        spread, settings = split(settings)
        asked, is_trained = session.settings, is_trainable(module)
        settings = taken_by(asked.strategy, settings, exact=asked.exact, is_trained=is_trained)
        self._check(module, settings)
        extra = {k: v for k, v in module.state_dict().items() if not isinstance(v, torch.Tensor)}
        check_savable(type(module).__name__, extra)
        self._place(module)
        if session.settings.precision in REDUCED:
            autocast_forward(module, session.device.type, REDUCED[session.settings.precision])
        # How a model is held must not change what the next one starts from.
        with undisturbed(), session.together.meeting("run.model"):
            held = self._hold(module, settings, spread)
        held.passes_in(session.passing)
        meeting = session.standing.meeting("the gathering of parameters")
        held.gathers_in(meeting, session.gathering)
        held.meets_in(session.standing.meeting("the exchange of buffers"))
        self._take(held)
        # DistributedDataParallel's; without effect, as gradients meet once per global batch anyway.
        held.wrapped.__dict__.setdefault("no_sync", contextlib.nullcontext)
        return held.wrapped

    def _take(self, held: WrappedModel) -> None:
        session = self._session
        before, asked = session.exactness, session.settings
        if asked.staleness and held.versions is None and held.parameters:
            held.versions = Versions(held.module, asked.staleness)
        parts = [layer.ranks.exactness for layer in layers(held.module)]
        held.exactness = worst([held.exactness, *parts])
        session.models.append(held)
        if session.exactness != before:  # what was said when the run began does not hold any more
            session.holding(0).warn(
                f"lockstep: {asked.name}: {session.exactness}, "
                f"by how {type(held.module).__name__} is held"
            )

    @property
    def _is_spread(self) -> bool:
        return self._session.formation.mesh.model > 1

    def _place(self, module: nn.Module) -> None:
        """Move a module to this rank's device, but for one whose parts are to stay where they are."""
        is_cut = self._is_spread and STRATEGIES.find(self._session.settings.strategy).places
        if not (is_cut and is_trainable(module)) and not spans_devices(module):
            module.to(self._session.device)

    def _check(self, module: nn.Module, settings: dict[str, Any]) -> None:
        if any(module in (held.module, held.wrapped) for held in self._session.models):
            raise ModelError(f"this {type(module).__name__} belongs to the run already")
        refuse_unconverted(module)
        if self._session.replicas > 1:
            refuse_changing(module)
        asked = self._session.settings
        check = resolve(STRATEGIES.find(asked.strategy).check)
        check(module, settings, exact=asked.exact, device=self._session.device)

    def _hold(
        self, module: nn.Module, settings: dict[str, Any], spread: dict[str, Any]
    ) -> WrappedModel:
        session = self._session
        number, self._tried = self._tried, self._tried + 1
        holding = session.holding(number)
        if session.groups.everyone is not None:
            world = session.world
            check_same_models(module, str(number), session.store, world.rank, world.size)
        if not is_trainable(module):
            return FrozenModel(module, holding.block, holding.replicas, holding.group, settings)
        strategy = STRATEGIES.find(session.settings.strategy)
        if strategy.name == "ps":
            return self._serve(module, holding, settings)
        if strategy.spreads and not self._is_spread:
            strategy = STRATEGIES.find("ddp")
        held: WrappedModel = resolve(strategy.hold)(
            module, holding, spread if strategy.spreads else settings
        )
        held.exactness = worst([held.exactness, strategy.exactness])
        return held

    def _serve(
        self, module: nn.Module, holding: ModelContext, settings: dict[str, Any]
    ) -> WrappedModel:
        """Hold a model with the servers of the run."""
        session, late = self._session, self._session.settings.staleness
        waiting = session.standing.meeting("optimizer.step")
        if self._serving is None:
            meeting = session.same_data.meeting
            self._serving = Serving(meeting, session.settings.servers, session.directory)
        serving = self._serving
        where = serving.find()
        with contextlib.ExitStack() as failed:
            failed.callback(serving.release)
            links = connect(
                where,
                holding.forest,
                holding.replicas,
                holding.store,
                str(holding.number),
                session.threads,
                tells=not self._is_served,
                release=serving.release,
            )
            failed.pop_all()
            failed.callback(links.close)
            held: WrappedModel = (
                hold_served(module, holding, settings, links)
                if late is None
                else hold_remotely(module, holding, settings, links, late, waiting)
            )
            failed.pop_all()
        self._is_served = True
        return held

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
        held = self._session.models
        if model is None and len(held) == 1:
            return held[0]
        for candidate in held:
            if model is not None and model in (candidate.module, candidate.wrapped):
                return candidate
        raise ModelError(
            f"the run holds {len(held)} models; expected one of them to be named",
            hint="pass what run.model returned",
        )
