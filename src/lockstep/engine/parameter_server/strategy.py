"""Strategy `ps`: every worker has a copy of the model, and servers sum the gradients.

Without a staleness servers sum gradients, and every worker updates its own copy. With a staleness K,
servers hold the parameters and the optimizer, and workers compute: in passes with gradients a worker's own
copy lacks exactly the latest K updates (`versions.py`); it waits only where those before them have not
happened yet.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.layout.classes import of_servers
from lockstep.engine.parameter_server.client import Clients
from lockstep.engine.parameter_server.exchange import ServerExchange
from lockstep.engine.parameter_server.remote_optimizer import RemoteOptimizer
from lockstep.engine.parameter_server.servers import Servers
from lockstep.engine.strategies.buffers import broadcast_model
from lockstep.engine.strategies.checks import shares_buffers
from lockstep.engine.strategies.ddp import ReplicatedModel
from lockstep.engine.strategies.gradient_accumulation import NO_GRADIENT, Gradients, take_gradients
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.staleness import Versions
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import ExactnessError, ModelError, StepError
from lockstep.registry import EXCHANGES, WITH_SERVERS


def wrap(
    module: nn.Module, context: ModelContext, settings: Mapping[str, Any]
) -> ServedModel | RemoteModel:
    """Wrap a copy of `module` on every worker, with the servers of the run.

    Raises:
        PeerError: if a server is gone, cannot be found, or not be started.
        ExactnessError: where servers update, on a GPU, with `exact`.
        ModelError: for keywords that would make the result another.
    """
    assert isinstance(context.servers, Servers)
    clients = context.servers.connect(context)
    try:
        if context.staleness is None:
            return ServedModel(module, context, settings, clients)
        return _wrap_remote(module, context, settings, clients, context.staleness)
    except BaseException:
        clients.close()
        raise


def _end(clients: Clients, context: ModelContext) -> dict[str, int]:
    """Print the traffic of the servers, on the main rank and once; return this rank's bytes."""
    if clients.leads and clients.is_first:
        for line in clients.traffic():
            context.say(line)
    return clients.moved


# --- servers sum -------------------------------------------------------------------------------------


class ServedModel(ReplicatedModel):
    """A replicated model whose gradients are summed by servers; every worker updates its own copy."""

    def __init__(
        self,
        module: nn.Module,
        context: ModelContext,
        settings: Mapping[str, Any],
        clients: Clients,
    ) -> None:
        super().__init__(module, context, ServerExchange(clients, context.forest), settings)
        self._clients, self._context = clients, context

    def ends(self) -> dict[str, int]:
        """Print the traffic of the servers; return this rank's bytes."""
        return _end(self._clients, self._context)


# --- servers update ----------------------------------------------------------------------------------


class RemoteModel(WrappedModel):
    """A model whose parameters are updated by servers."""

    is_split = True  # so that its optimizer's state is asked for here, and it has one of its own

    def __init__(
        self,
        module: nn.Module,
        context: ModelContext,
        clients: Clients,
        staleness: int,
    ) -> None:
        super().__init__(module, context)
        self._context, self._clients, self._staleness = context, clients, staleness
        self._waiting = context.stepping
        self.versions: Versions = Versions(module, staleness, made_here=False)
        self._remotes: list[RemoteOptimizer] = []
        self._nodes: list[Gradients] = []
        self._shown: list[tuple[torch.Tensor | None, int]] = []
        self._place = 0
        self.exactness = of_servers(WITH_SERVERS, staleness, context.device.type)

    # --- a step ----------------------------------------------------------------------------------

    def _prepare(self, microbatch: Microbatch) -> None:
        self._place = microbatch.place

    def _sum_gradients(self, microbatch: Microbatch) -> None:
        self.accumulation.push(take_gradients(self.parameters))
        if not microbatch.last:
            return
        self._nodes = self.accumulation.take()
        self._shown = []
        for place, parameter in enumerate(self.parameters):
            # This rank's part of it, so that scripts see that there is one, and may drop it.
            mine = [node[place] for node in self._nodes]
            parameter.grad = next((part for part in mine if part is not None), None)
            self._shown.append((parameter.grad, _version(parameter.grad)))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer's steps happen in the servers.

        Raises:
            ModelError: if servers could not make one like it.
        """
        own = {id(p) for p in self.parameters}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ModelError(
                f"{type(optimizer).__name__} holds frozen parameters of "
                f"{type(self.module).__name__}; expected trainable ones, which servers update",
                hint="pass it the parameters with requires_grad=True alone",
            )
        number = len(self._remotes)
        remote = RemoteOptimizer(
            optimizer, number, self._clients, self._context.forest, NO_GRADIENT
        )
        self._remotes.append(remote)

        def step(_self: Optimizer) -> None:
            with self._waiting():
                self._step(remote, type(optimizer).__name__)

        wrapped = functools.wraps(optimizer.step)(step)
        optimizer.step = MethodType(wrapped, optimizer)  # type: ignore[method-assign]

    def _step(self, remote: RemoteOptimizer, name: str) -> None:
        own = remote.parameters
        self.versions.check(own, name)
        self.versions.begin(own)
        if not remote.has_begun:
            self._receive_all(remote)
            remote.begin(self.versions.newest(own))
        remote.step(self._gradients_of(remote), self._place)
        self.versions.drop(own, coming=remote.coming)
        if not self.versions.count(own):
            self.versions.add(own, remote.receive())
        self.show_oldest()
        remote.keep(self.versions.count(own))

    def _gradients_of(self, remote: RemoteOptimizer) -> list[Gradients]:
        """Return this rank's nodes, for the parameters of one optimizer."""
        if not self.several_replicas:
            return [[parameter.grad for parameter in remote.parameters]]
        places = {id(p): place for place, p in enumerate(self.parameters)}
        chosen = [places[id(p)] for p in remote.parameters]
        for place in chosen if self._nodes else ():
            self._check_unchanged(place)
        return [
            [None if self.parameters[place].grad is None else node[place] for place in chosen]
            for node in self._nodes
        ]

    def _check_unchanged(self, place: int) -> None:
        gradient = self.parameters[place].grad
        shown, version = self._shown[place]
        if gradient is not None and (gradient is not shown or _version(gradient) != version):
            raise StepError(
                f"the script has changed a gradient of {type(self.module).__name__}, which is this "
                "rank's part of it alone; the parts are added in the servers",
                hint="change the loss instead, or leave out the staleness: then gradients are whole here",
            )

    def total_norm(self, parameters: Any, norm_type: float) -> torch.Tensor:
        """Refuse: no rank ever has the whole gradient."""
        raise StepError(
            f"run.clip_grad_norm_ needs the whole gradient of {type(self.module).__name__}, which with "
            f"staleness={self._staleness} only the servers have",
            hint="leave out the staleness: then gradients are whole on every worker",
        )

    # --- versions --------------------------------------------------------------------------------

    def _receive_all(self, remote: RemoteOptimizer) -> None:
        while remote.coming:
            self.versions.add(remote.parameters, remote.receive())

    def _wait(self) -> None:
        """Receive all versions: no rank gets the newest before all have sent their gradients."""
        with self._waiting() if any(one.coming for one in self._remotes) else nullcontext():
            for remote in self._remotes:
                self._receive_all(remote)

    def show_newest(self) -> None:
        """Set parameters to the version with all updates; waits for it."""
        self._wait()
        super().show_newest()

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the module's `state_dict`, with all updates; waits until they have happened."""
        self._wait()
        return super().state()

    def extras(self) -> dict[str, Any]:
        """Return the older versions of parameters; waits until all updates have happened."""
        self._wait()
        return super().extras()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a whole model's `state_dict`; the servers get it with the next step.

        Optimizers keep their state, as they do where they step on every rank.
        """
        self._wait()
        for remote in self._remotes:
            remote.bring_back()
        super().load(state)
        for remote in self._remotes:
            remote.keep(0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the `state_dict` that an optimizer would have if it had stepped here."""
        self._wait()
        return next(one for one in self._remotes if one.optimizer is optimizer).state()

    # --- the end ---------------------------------------------------------------------------------

    def ends(self) -> dict[str, int]:
        """Print the traffic of the servers; return this rank's bytes."""
        self._wait()
        return _end(self._clients, self._context)

    def close(self) -> None:
        """Leave the servers."""
        self._clients.close()


def _wrap_remote(
    module: nn.Module,
    context: ModelContext,
    settings: Mapping[str, Any],
    clients: Clients,
    staleness: int,
) -> RemoteModel:
    assert context.group is not None
    _check_settings(settings, staleness, context)
    if context.exact and context.device.type != "cpu":
        raise ExactnessError(
            f"staleness={staleness} on {context.device}: servers update on the CPU, whose kernels round "
            "otherwise than a single GPU's",
            hint="leave out the staleness, or say exact=False to the run (lockstep run --no-exact)",
        )
    broadcast_model(module, context.group)
    return RemoteModel(module, context, clients, staleness)


def _check_settings(settings: Mapping[str, Any], staleness: int, context: ModelContext) -> None:
    """Refuse keywords that would change the result, and warn that the others have no effect."""
    if not shares_buffers(settings):
        raise ModelError(
            f"broadcast_buffers=False with staleness={staleness}: all workers have replica 0's buffers "
            "when their models are synchronized; expected buffers that all ranks share",
            hint="leave out broadcast_buffers, or the staleness: then each rank may keep its own",
        )
    idle = sorted(settings.keys() - EXCHANGES.keywords())
    if idle:
        context.warn(
            f"lockstep: {', '.join(idle)} of run.model: without effect with staleness={staleness}, where "
            "DistributedDataParallel has no part"
        )


def _version(gradient: torch.Tensor | None) -> int:
    """Return autograd's count of in-place changes of a tensor."""
    return 0 if gradient is None else gradient._version
