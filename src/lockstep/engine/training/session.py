"""`Session`: life cycle of a run in this process, from its rendezvous to its digest."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from lockstep import unknown_variables as variables
from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.engine.recovery import checkpointing
from lockstep.engine.recovery.preemption import Preempted, Signals
from lockstep.engine.recovery.recomputed import Recomputed
from lockstep.engine.recovery.state import State, footprint
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training import fingerprint
from lockstep.engine.training.audit import Audit
from lockstep.engine.training.audit_report import IN_AUDIT
from lockstep.engine.training.averages import Averages
from lockstep.engine.training.backward import Backward
from lockstep.engine.training.call_sites import CallSites
from lockstep.engine.training.carried_variables import CarriedVariables
from lockstep.engine.training.collective_check import RankOrder
from lockstep.engine.training.context import join
from lockstep.engine.training.digest import digest
from lockstep.engine.training.divergence import check_same
from lockstep.engine.training.faults import Faults
from lockstep.engine.training.listeners import Listener
from lockstep.engine.training.loaders import Loaders
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.loss_scale import Scaler
from lockstep.engine.training.metrics import Metrics
from lockstep.engine.training.models import Models
from lockstep.engine.training.rank_statistics import RankStatistics
from lockstep.errors import LockstepError, ModelError, PeerError, RunError, StepError
from lockstep.setting_checks import audit_steps
from lockstep.settings import Settings
from lockstep.world import World, mpi
from lockstep.world.rendezvous.rank_rendezvous import leave

#: Seconds that a checkpoint which is being written has left when the script fails.
_PATIENCE = 10.0


class Session:
    """A run from the rendezvous of its ranks to its end.

    Args:
        settings: what is asked for.
        world: rank and rendezvous of this process.
        store: a store that all ranks have, of the script's own.

    Attributes:
        context: what all parts of the run know of it.
        state: the models and all else that the run has been told of.
        loop: where the run stands.
        models: takes models into the run.
        loaders: makes loaders.
        backward: runs backward passes.
        metrics: sums over samples.
        rank_order: says which rank goes first.
        call_sites: of what the script gives to the run.
    """

    #: whether a run was asked to end when it had, so that the next one is
    _stops: ClassVar[bool] = False

    def __init__(self, settings: Settings, world: World, store: dist.Store | None = None) -> None:
        self._started = time.monotonic()
        self.context = context = join(settings, world, store)
        try:
            self._begin()
        except BaseException:
            context.record.close(None)
            raise
        patient = context.world.environment == "lockstep"
        self._signals = Signals(self._checkpointing.stop, patient=patient)
        set_key(keys.derive(settings.seed, keys.INIT))

    def _begin(self) -> None:
        """Make the parts, and let the loop begin, or resume from the newest state."""
        context, record = self.context, self.context.record
        self.state = State()
        averages = Averages(context.of_model(-1), self.state.models)
        self._averages, self._faults = averages, Faults.of(os.environ, context.world)
        seed, models = context.settings.seed, self.state.models
        listeners = self._listeners()
        self.loop = Loop(seed, context.replicas, models, listeners)
        self._variables = CarriedVariables(self.loop, self.state, context.world, record.warn)
        listeners.append(self._variables)
        self.loop.at_arrival = self._variables.arrived
        self.loop.followed, self.loop.warn = averages.followed, record.warn
        every = audit_steps(context.settings.audit)
        if every is not None and context.settings.exact and context.replicas > 1:
            self.loop.audit = Audit(context, self.state, every, self._variables.observe)
        self.models = Models(context, self.state, self._damage)
        self.loaders = Loaders(context, self.loop)
        self._variables.loaders = self.loaders.made
        self.call_sites = CallSites(self.loop)
        self.backward = Backward(context, self.state, self.loop, self._faults)
        if context.memory is not None and context.settings.exact:
            losses, before = context.memory.losses, context.memory.losses_before
            self.backward.recomputed = Recomputed(losses, before, record.warn_anywhere)
        if context.replicas > 1:
            observe, backward = self._variables.observe, self.backward
            listeners.append(
                RankStatistics(
                    self.loop, context.world, observe, lambda: backward.passes, record.warn
                )
            )
        block, data, collective = (
            context.dims.block,
            context.groups.data,
            context.collectives.collective,
        )
        self.metrics = Metrics(self.loop, context.replicas, block, data, collective)
        self.rank_order = RankOrder(context.world, context.store, context.heartbeat)
        context.collectives.fails = self.loop.fails
        record.bind(self.loop, self.digests)
        with context.rendezvous.reporting_failure():
            self._checkpointing = checkpointing.begin(
                context, self.state, self.loop, self._variables
            )
        self.loop.at_point, self.loop.at_epoch = self._at_point, self._at_epoch
        if self._faults is not None and self.loop.is_on_the_way:
            self._faults.go_on(self.loop.resumed)

    def _listeners(self) -> list[Listener]:
        """Return what is told of steps and loops."""
        context = self.context
        listeners: list[Listener] = [context.record, context.heartbeat, self._averages]
        if context.watchdog is not None:
            listeners.append(context.watchdog)
        if context.settings.precision == "fp16":
            record = context.record
            self.state.scaler = Scaler(context.group, context.device, record.warn, record.log)
            listeners.append(self.state.scaler)
        return listeners

    def _damage(self, module: nn.Module) -> None:
        if self._faults is not None:
            self._faults.damage(module, lambda: self.loop.steps)

    def _at_point(self) -> None:
        if self._faults is not None:
            self._faults.after_step(self.loop.steps)
        self._variables.at_point()
        self._checkpointing.at_point()

    def _at_epoch(self) -> None:
        self.state.epoch_begins()
        self._variables.epoch_begins()

    def open(self) -> None:
        """Say what runs, on the main rank, and listen to signals from here on."""
        context, record = self.context, self.context.record
        self._signals.listen()
        self._variables.opens()
        if context.memory is not None:
            context.memory.opened()
        if self._stops:
            self._checkpointing.stop()
        if context.world.environment != "lockstep":  # a launcher says it itself
            lines = variables.warnings(os.environ)
            for line in (*lines, *filter(None, [context.resume_info.note])):
                record.warn(line)
        name, replicas = context.settings.name, context.replicas
        title = fingerprint.title(name, self.models.exactness, replicas, context.world.size)
        exchange = "" if context.group is None else f", exchange {context.exchange}"
        record.say(
            f"{title}, {context.device.type}{exchange}, threads {context.threads}, "
            f"{record.shown_directory}{record.origin}"
        )
        if not context.says_replicas and replicas > 1:
            record.say(fingerprint.unset(name, replicas))

    # --- what the run asks for -------------------------------------------------------------------

    def register(self, name: str, value: Any) -> None:
        """Count `value` as state of the run."""
        self.state.register(name, value)
        self._averages.add(value)

    def save(self, best: float | None) -> None:
        """Save the state: in a loop when the script is done with this batch, elsewhere now."""
        if self.loop.is_in_loop:
            # Once per batch: a condition on run.step holds on some ranks' earlier microbatches only.
            if self.loop.acts_now() and not self.loop.is_on_the_way:
                self._checkpointing.ask(best)
        elif not self.loop.passes_save():
            self._checkpointing.ask(best)
            self.loop.point()

    def digest(self) -> str:
        """Return the digest of all models and registered objects."""
        self.loop.come_together()
        if self.loop.microbatch is None:
            self.loop.settle()
        return digest(self.state.parts().values())

    def digests(self) -> dict[str, str]:
        """Return a digest for each model and registered object."""
        if self.loop.microbatch is None:
            self.loop.settle()
        return {name: digest([part]) for name, part in self.state.parts().items()}

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.context.group is not None:
            with self.context.collectives.collective("run.barrier"):
                dist.barrier(group=self.context.group)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> str:
        """The script is done: agree with the other ranks on the result, record it, and return its digest.

        What the script wanted to be saved is on disk then.

        Raises:
            CheckpointError: if it cannot be written, or the script never came to where it was resumed.
            DivergenceError: if a rank holds other bits.
            PeerError: if a rank does not come to its end.
        """
        context, record, watchdog = self.context, self.context.record, self.context.watchdog
        self.loop.first_error.check()
        self.loop.approach()
        self.loop.progress.check_arrived()
        self.loop.come_together()
        for model in self.state.models if self.loop.is_in_loop else ():
            model.check_between()  # an iterator over a loader may live on
        if self.loop.audit is not None:
            self.loop.audit.warn_of_counts()
        self._checkpointing.finish()
        for number, model in enumerate(self.state.models):
            record.traffic(number, model.ends())
        own = self.digest()
        used = footprint(self.state, context.device)
        if watchdog is not None:
            watchdog.run_ends()
        record.script_ends()
        with context.heartbeat.collective("the end of the run"):
            if context.group is not None:
                check_same(context.rendezvous, own, self.digests, exact=context.settings.exact)
        if watchdog is not None:
            watchdog.close()  # from here on no rank waits for another one
        if self.backward.passes and not self.loop.steps:
            record.warn(
                "lockstep: warning: gradients were computed, but no optimizer of the run has stepped; "
                "pass it through run.optimizer(…)"
            )
        settings = self._settings() if self.models.exactness == "exact" else None
        record.finish(own, time.monotonic() - self._started, used, settings)
        return own

    def _settings(self) -> list[str]:
        """Return what the result follows from, besides the run's identity, its data and the source."""
        models = [str(model.module) for model in self.state.models]
        return [*models, *(f"{type(o).__name__} {o.defaults}" for o in self.state.optimizers)]

    def close(self, error: BaseException | None) -> None:
        """Give back everything; after an error nothing that would wait for other ranks."""
        context, audit = self.context, self.loop.audit
        is_scripts = isinstance(error, Exception) and not isinstance(error, LockstepError)
        if is_scripts and audit is not None and (audit.was_left or self.loop.is_audited):
            error.add_note(IN_AUDIT)  # type: ignore[union-attr]
        self._signals.close()
        Session._stops = error is None and self._checkpointing.stop_asked
        failed = error is not None and not isinstance(error, Preempted)
        # First: once the others know of the error, they write no more.
        own = failed and not isinstance(error, PeerError | KeyboardInterrupt)
        self._checkpointing.close(_PATIENCE if own else 0.0)
        if failed and error is not None:
            mpi.fail()
            context.rendezvous.fail(error)
        context.heartbeat.closes(left=failed and isinstance(error, SystemExit))
        self.loop.close()
        if context.watchdog is not None:
            context.watchdog.close()
        for model in self.state.models:
            model.close()
        self.loaders.close()
        try:
            if isinstance(error, Preempted):
                context.record.preempted(error.step)
            context.record.close(error if failed else None)
        finally:
            if context.connection.owned and not failed:
                leave(context.rendezvous)
                dist.destroy_process_group()


# --- errors of a script ----------------------------------------------------------------------------


def explained(error: BaseException, models: Sequence[WrappedModel]) -> RunError | None:
    """Return what an error of the script means, where that is more than it says."""
    if not isinstance(error, RuntimeError):
        return None
    if "nested_tensorlist[0].empty()" in str(error) and any(m.several_replicas for m in models):
        return StepError(
            "torch.nn.utils.clip_grad_value_ found no gradients; on microbatches that are not the last "
            "of their global batch there are none yet",
            hint="run.clip_grad_value_(model, value), which acts once per global batch",
        )
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if prune.__file__ in frames and any(model.is_split for model in models):
        return ModelError(
            "torch.nn.utils.prune was given a model of which each rank holds a part; expected a whole one",
            hint="prune before run.model(model), or strategy='ddp'",
        )
    return None


def show_plainly() -> None:
    """Let an error of the user's be one message instead of a traceback, under plain `python` too."""
    if sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, LockstepError):
            sys.stderr.write(f"lockstep: error: {error}\n")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
