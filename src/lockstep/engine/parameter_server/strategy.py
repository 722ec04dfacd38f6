"""Strategy `ps`: every worker has a copy of the model, and parameter servers sum the gradients.

Without a staleness every worker updates its own copy with the sum. With a staleness K the servers also step
the optimizer, and send new parameters to the workers. A worker computes gradients with parameters that
lack exactly the latest K updates (`strategies/staleness.py`), so that it rarely waits for the servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial, wraps
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
from lockstep.engine.strategies.gradient_accumulation import Gradients, take_gradients
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.staleness import Versions
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.errors import ExactnessError, ModelError, StepError
from lockstep.registry import EXCHANGES, WITH_SERVERS


def wrap(
    module: nn.Module, context: ModelContext, settings: Mapping[str, Any]
) -> ServedModel | RemoteModel:
    """Wrap `module`, of which every worker has a copy, and connect to the servers of the run.

    `settings`: keyword arguments of `run.model` for the strategy. The result is a `RemoteModel` if the run
    has a staleness, else a `ServedModel`.

    Raises:
        PeerError: if a server has ended, cannot be found, or cannot be started.
        ExactnessError: with `exact`, for a staleness on a GPU.
        ModelError: for `broadcast_buffers=False` with a staleness.
    """
    assert isinstance(context.servers, Servers)
    clients = context.servers.connect(context)
    try:
        staleness = context.staleness
        if staleness is None:
            return ServedModel(module, context, settings, clients)
        assert context.group is not None
        _check_settings(settings, staleness, context)
        broadcast_model(module, context.group)
        return RemoteModel(module, context, clients, staleness)
    except BaseException:
        clients.close()
        raise


class ServedModel(ReplicatedModel):
    """A model of which each worker has, and updates, a copy; parameter servers sum the gradients."""

    def __init__(
        self,
        module: nn.Module,
        context: ModelContext,
        settings: Mapping[str, Any],
        clients: Clients,
    ) -> None:
        super().__init__(module, context, ServerExchange(clients, context.forest), settings)
        self._clients = clients

    def ends(self) -> dict[str, int]:
        """Print the servers' traffic once per run; return bytes `sent` and `received` by this rank."""
        return self._clients.ends()


class RemoteModel(WrappedModel):
    """A model whose parameters are updated in servers and sent to the workers; used with a staleness."""

    is_split = True  # so that `optimizer_state` is called, and the optimizer has no other model

    def __init__(
        self,
        module: nn.Module,
        context: ModelContext,
        clients: Clients,
        staleness: int,
    ) -> None:
        super().__init__(module, context)
        self._context, self._clients, self._staleness = context, clients, staleness
        self._waiting = partial(context.collective, "optimizer.step")
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
            # This rank's part of the gradient: a script may test or drop it.
            mine = [node[place] for node in self._nodes]
            parameter.grad = next((part for part in mine if part is not None), None)
            self._shown.append((parameter.grad, _version(parameter.grad)))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Replace `optimizer.step` by a function that sends gradients to servers, which then step.

        Raises:
            ModelError: if the optimizer has frozen parameters, or servers cannot import its class.
        """
        own = {id(p) for p in self.parameters}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ModelError(
                f"{type(optimizer).__name__} holds frozen parameters of "
                f"{type(self.module).__name__}; expected trainable ones, which servers update",
                hint="pass it the parameters with requires_grad=True alone",
            )
        number = len(self._remotes)
        remote = RemoteOptimizer(optimizer, number, self._clients, self._context.forest)
        self._remotes.append(remote)

        def step(_self: Optimizer) -> None:
            with self._waiting():
                self._step(remote, type(optimizer).__name__)

        wrapped = wraps(optimizer.step)(step)
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
        self.versions.show_oldest()
        remote.keep(self.versions.count(own))

    def _gradients_of(self, remote: RemoteOptimizer) -> list[Gradients]:
        """Return this rank's gradients of the parameters of one optimizer, summed over its replicas.

        The result has one list of gradients for each partial sum. There are several if the fixed order of
        additions first adds some of this rank's replicas to those of other ranks.

        Raises:
            StepError: if the run has several replicas, and the script has changed a gradient.
        """
        if not self.several_replicas:
            return [[parameter.grad for parameter in remote.parameters]]
        places = {id(p): place for place, p in enumerate(self.parameters)}
        chosen = [places[id(p)] for p in remote.parameters]
        for place in chosen if self._nodes else ():
            gradient, (shown, version) = self.parameters[place].grad, self._shown[place]
            if gradient is not None and (gradient is not shown or _version(gradient) != version):
                raise StepError(
                    f"the script has changed a gradient of {type(self.module).__name__}, which is this "
                    "rank's part of it alone; the parts are added in the servers",
                    hint="change the loss instead, or leave out the staleness: then gradients are whole "
                    "here",
                )
        return [
            [None if self.parameters[place].grad is None else node[place] for place in chosen]
            for node in self._nodes
        ]

    def total_norm(self, parameters: Any, norm_type: float) -> torch.Tensor:
        """Raise a `StepError`: ranks have only their own parts of the gradients, so the norm is unknown."""
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
        """Receive all versions of the parameters that are still to come from the servers.

        There is one version after each update.
        """
        with self._waiting() if any(one.coming for one in self._remotes) else nullcontext():
            for remote in self._remotes:
                self._receive_all(remote)

    def show_newest(self) -> None:
        """Wait for the parameters after the servers' latest update; copy them to the module."""
        self._wait()
        super().show_newest()

    # --- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Wait until the servers have made all updates; return the module's up-to-date `state_dict`."""
        self._wait()
        return super().state()

    def extras(self) -> dict[str, Any]:
        """Wait for pending updates; return the older versions of the parameters, still in use.

        Gradients lack the latest updates, so that these versions belong to the saved state.
        """
        self._wait()
        return super().extras()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the model's `state_dict`, and fetch the optimizers' state from the servers.

        The next step sends parameters and optimizers' state to the servers again.
        """
        self._wait()
        for remote in self._remotes:
            remote.bring_back()
        super().load(state)
        for remote in self._remotes:
            remote.keep(0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the `state_dict` of `optimizer`, with its state fetched from the servers."""
        self._wait()
        return next(one for one in self._remotes if one.optimizer is optimizer).state()

    # --- the end ---------------------------------------------------------------------------------

    def ends(self) -> dict[str, int]:
        """Print the servers' traffic once per run; return bytes sent and received by this rank.

        Before that, wait until the servers have made all updates. The keys of the result are `sent` and
        `received`.
        """
        self._wait()
        return self._clients.ends()

    def close(self) -> None:
        """Close the connections to the servers."""
        self._clients.close()


def _check_settings(settings: Mapping[str, Any], staleness: int, context: ModelContext) -> None:
    """Raise an error for settings that a staleness excludes; warn of DDP arguments without effect.

    Raises:
        ModelError: for `broadcast_buffers=False`.
        ExactnessError: with `exact`, on a GPU.
    """
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
    if context.exact and context.device.type != "cpu":
        raise ExactnessError(
            f"staleness={staleness} on {context.device}: servers update on the CPU, whose kernels round "
            "otherwise than a single GPU's",
            hint="leave out the staleness, or say exact=False to the run (lockstep run --no-exact)",
        )


def _version(gradient: torch.Tensor | None) -> int:
    """Return the number of in-place changes of `gradient` (its `_version`); 0 if it is `None`."""
    return 0 if gradient is None else gradient._version
