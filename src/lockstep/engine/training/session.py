"""`Session`: a run in this process, from the rendezvous of the ranks to the final digest."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch.nn.utils import prune

from lockstep import unknown_variables
from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.engine.recovery.checkpointing import make_saver
from lockstep.engine.recovery.preemption import Preempted, Signals
from lockstep.engine.recovery.recomputed import RecomputedLosses
from lockstep.engine.recovery.resume import StateSearch
from lockstep.engine.recovery.script_state import ScriptState
from lockstep.engine.recovery.state import State, footprint
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.audit import Audit
from lockstep.engine.training.audit_report import IN_AUDIT
from lockstep.engine.training.averaged_models import AveragedModels
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
from lockstep.engine.training.replayed_steps import ReplayedSteps
from lockstep.engine.training.step_hashes import StepHashes
from lockstep.errors import (
    CheckpointError,
    LockstepError,
    ModelError,
    PeerError,
    RunError,
    StepError,
)
from lockstep.setting_checks import audit_steps
from lockstep.settings import Settings
from lockstep.state.checkpoint.catalog import DIRECTORY, Catalog
from lockstep.world import World, accelerator, mpi
from lockstep.world.rendezvous.rank_rendezvous import leave

#: Seconds to wait for an unfinished checkpoint when the script has failed.
_PATIENCE = 10.0
#: Seconds to wait for an unfinished checkpoint after a failed audit: the launcher ends all ranks soon.
_MOMENT = 0.2
_MEMORY_HINT = (
    "hint: a smaller batch_size; more replicas on as many ranks (--replicas), which is gradient "
    "accumulation over smaller microbatches; or strategy='fsdp', which splits parameters"
)


class Session:
    """A run in this process, from the rendezvous of the ranks to the run's end, with all of its parts."""

    #: Whether a signal came too late to end the process's previous run, and is to end the next run.
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
        """Create the run's loop, models, metrics and so on; begin the run or resume its newest state."""
        context, record, settings = self.context, self.context.record, self.context.settings
        self.state = state = State()
        faults = Faults.of(os.environ, context.world)
        self._averages = AveragedModels(context.of_model(-1), state.models)
        self.loop = loop = Loop(
            settings.seed,
            context.replicas,
            state.models,
            followed=self._averages.followed,
            first_error=context.first_error,
        )
        self._variables = variables = CarriedVariables(loop, state, context.world, record.warn)
        every = audit_steps(settings.audit)
        if every is not None and settings.exact and context.replicas > 1:
            loop.audit = Audit(context, state, every, variables.observe)
        self.models = Models(context, state, faults)
        self.loaders = Loaders(context, loop)
        variables.loaders = self.loaders.made
        self.call_sites = CallSites(loop)
        self.backward = backward = Backward(context, state, loop, faults)
        if context.memory is not None and settings.exact:
            losses, before = context.memory.losses, context.memory.losses_before
            backward.recomputed = RecomputedLosses(losses, before, record.warn_anywhere)
        dims, collective = context.dims, context.collectives.collective
        self.metrics = Metrics(loop, dims.replicas, dims.block, context.groups.data, collective)
        self.rank_order = RankOrder(context.world, context.connection.store, context.heartbeat)
        record.bind(loop, self.digests)
        listeners: list[Listener | None] = [record, context.heartbeat, self._averages]
        listeners.append(context.watchdog)
        if settings.precision == "fp16":
            state.scaler = Scaler(context.group, context.device, record.warn, record.log)
            listeners.append(state.scaler)
        listeners += [StepHashes.of(context, loop, state), variables]
        if context.replicas > 1:
            observe, world = variables.observe, context.world
            listeners.append(
                RankStatistics(loop, world, observe, lambda: backward.passes, record.warn)
            )
        with context.rendezvous.reporting_failure():
            catalog = self._resume()
            self._checkpointing = saver = make_saver(
                context, state, loop, self.metrics, catalog, variables.saved
            )
        if faults is not None and loop.is_replaying:
            faults.resume(loop.resumed)
        # Faults first: their signal at a point must have arrived when the state is saved there.
        listeners += [faults, saver, ReplayedSteps.of(os.environ, loop, state, saver.ask)]
        loop.listen(listener for listener in listeners if listener is not None)

    def _resume(self) -> Catalog:
        """Resume from the newest state in any rank's memory or on disk; without one, begin a new run.

        Returns:
            The checkpoints in the run's directory.

        Raises:
            RunDirectoryError: if the directory has a checkpoint of another run.
            CheckpointError: if the disk cannot be read.
        """
        context, record, memory = self.context, self.context.record, self.context.memory
        parent, where = context.resume_info.parent, record.directory / DIRECTORY
        catalog = Catalog(where, asdict(context.identity), record.warn, parent=parent)
        if self.loop.audit is not None:
            self.loop.audit.distrust = partial(self._distrust, catalog)
            catalog.confirmed = lambda: record.audits.confirmed
        snapshots = None if memory is None else memory.snapshots
        saved = None
        is_new = context.resume_info.is_new and parent is None
        if record.audits.unconfirmed:
            self._set_aside(catalog)
            if snapshots is not None:
                snapshots.forget_after(record.audits.confirmed or 0)
        if not is_new or context.world.generation > 0:
            saved = StateSearch(context.rendezvous, context.group, snapshots, catalog).find()
        has_memory = snapshots is not None and snapshots.found is not None
        if snapshots is not None:
            snapshots.found = None
        if saved is None:
            if not is_new and context.world.generation == 0:
                place = record.shown_directory
                record.say(
                    f"lockstep: the earlier run in {place} left no checkpoint: beginning at step 0"
                )
            record.begin(0, None)
            return catalog
        if parent is not None and Path(saved.source).name == parent:
            saved = replace(saved, say=record.say)
        self._variables.resumed = saved.variables
        self.loop.resume(saved, self.state)
        record.begin(self.loop.resumed, saved.source)
        if memory is not None and has_memory:
            memory.schedule.go_on(self.loop.resumed)
        return catalog

    def _distrust(self, catalog: Catalog) -> None:
        """After a failed audit, end the writing of checkpoints and rename unconfirmed ones.

        `catalog`: the checkpoints in the run's directory. Renamed are those that no audit has confirmed;
        unfinished ones are dropped.
        """
        self._checkpointing.close(_MOMENT)
        with contextlib.suppress(CheckpointError):  # the next start tries it again
            self._set_aside(catalog)

    def _set_aside(self, catalog: Catalog) -> None:
        """On the main rank, rename the checkpoints in `catalog` that no audit has confirmed.

        No run resumes renamed checkpoints.
        """
        record, step = self.context.record, self.context.record.audits.confirmed or 0
        if self.context.world.is_main and (aside := catalog.set_aside(step)):
            record.warn(
                f"lockstep: no audit has confirmed the checkpoints after step {step}, which are renamed: "
                f"{', '.join(path.name for path in aside)}"
            )

    def open(self) -> None:
        """Print the title line of the run on the main rank, and install signal handlers."""
        context, record = self.context, self.context.record
        self._signals.listen()
        self._variables.opens()
        if context.memory is not None:
            context.memory.slot.pid = os.getpid()  # the launcher may now send it signals
        if self._stops:
            self._checkpointing.stop()
        if context.world.environment != "lockstep":  # `lockstep run` prints these lines itself
            note = context.resume_info.note
            for line in [*unknown_variables.warnings(os.environ), *([note] if note else [])]:
                record.warn(line)
        for line in self.title_lines():
            record.say(line)

    def title_lines(self) -> list[str]:
        """Return the title line (exactness, ranks, directory), and a note if `replicas` is not set."""
        context, record = self.context, self.context.record
        name, replicas, ranks = context.settings.name, context.replicas, context.world.size
        hosted = f"{_counted(replicas, 'replica')} on {_counted(ranks, 'rank')}"
        exchange = "" if context.group is None else f", exchange {context.exchange}"
        title = (
            f"lockstep: {name}: {self.models.exactness}, {hosted}, {context.device.type}{exchange}, "
            f"threads {context.threads}, {record.shown_directory}{record.origin}"
        )
        if context.says_replicas or replicas == 1:
            return [title]
        unset = (
            f"lockstep: {name}: replicas is not set, so that {replicas} ranks mean {replicas} replicas, "
            f"and changing the number of ranks changes the result; replicas={replicas} gives the same on "
            f"1 to {replicas} ranks"
        )
        return [title, unset]

    # --- what the run asks for -------------------------------------------------------------------

    def register(self, name: str, value: Any) -> None:
        """Add `value` under `name` to the state that is saved and restored with the run."""
        self.state.register(name, value)
        self._averages.add(value)

    def save(self, best: float | None) -> None:
        """Request a checkpoint: at the end of the current batch of a loop, else at once.

        `best`: score of the state; the checkpoint with the highest score is kept. `None` without a score.
        """
        loop = self.loop
        if loop.is_in_loop:
            # Once per batch: a condition on run.step may differ between a rank's microbatches.
            if loop.acts_now() and not loop.is_replaying:
                self._checkpointing.ask(best)
            return
        loop.approach()
        is_replayed = loop.progress.passes_save()
        loop.arrive()
        if not is_replayed:
            self._checkpointing.ask(best)
            loop.point()

    def digest(self) -> str:
        """Return one digest of all models and all objects passed to `run.register`."""
        self.loop.average_models()
        self._finish_buffers()
        return digest(self.state.parts().values())

    def digests(self) -> dict[str, str]:
        """Return digests by name: of each model, registered object, and variable of `run.state`."""
        self._finish_buffers()
        parts = self.state.parts()
        for name, own in self.state.registered.items():
            if isinstance(own, ScriptState):
                variables = parts.pop(f"state of {name}")
                parts |= {f"{name}.{key}": {key: value} for key, value in variables.items()}
        return {name: digest([part]) for name, part in parts.items()}

    def _finish_buffers(self) -> None:
        if self.loop.microbatch is None:
            self.loop.first_error.check()
            self.loop.finish_buffers()

    def barrier(self, call: str) -> None:
        """Wait until all ranks have called the method `call` of the run, such as `run.barrier`."""
        if self.context.group is not None:
            with self.context.collectives.collective(call):
                dist.barrier(group=self.context.group)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> str:
        """End the run: write requested checkpoints, compare the ranks' digests, and return the digest.

        Raises:
            CheckpointError: if a checkpoint cannot be written, or the script never reached the position
                from which it resumed.
            DivergenceError: if the result of a rank has different bits.
            PeerError: if a rank does not reach the end of its run.
        """
        context, record, watchdog = self.context, self.context.record, self.context.watchdog
        self.loop.first_error.check()
        self.loop.approach()
        self.loop.progress.check_arrived()
        self.loop.average_models()
        for model in self.state.models if self.loop.is_in_loop else ():
            model.check_between()  # a loop whose iterator is still referenced has not ended
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
            watchdog.close()  # no rank waits for another one any more
        if self.backward.passes and not self.loop.steps:
            record.warn(
                "lockstep: warning: gradients were computed, but no optimizer of the run has stepped; "
                "pass it through run.optimizer(…)"
            )
        settings = None
        if self.models.exactness == "exact":
            # Besides the run's identity, its data and its source, the result depends on these.
            settings = [str(model.module) for model in self.state.models]
            settings += [f"{type(o).__name__} {o.defaults}" for o in self.state.optimizers]
        record.finish(own, time.monotonic() - self._started, used, settings)
        return own

    def close(self, error: BaseException | None) -> None:
        """Release all resources of the run; after an error, do not wait for other ranks."""
        context, audit = self.context, self.loop.audit
        is_scripts = isinstance(error, Exception) and not isinstance(error, LockstepError)
        if is_scripts and audit is not None and (audit.was_left or self.loop.is_audited):
            error.add_note(IN_AUDIT)  # type: ignore[union-attr]
        if is_scripts and accelerator.holds(context.device) and accelerator.is_out_of_memory(error):
            error.add_note(  # type: ignore[union-attr]
                f"rank {context.world.rank} on {context.device}, step {self.loop.updates + 1}: "
                f"{accelerator.memory_use(context.device)}\n{_MEMORY_HINT}"
            )
        self._signals.close()
        Session._stops = error is None and self._checkpointing.stop_asked
        failed = error is not None and not isinstance(error, Preempted)
        # First, since other ranks stop writing their parts of a checkpoint when they read the error.
        own = failed and not isinstance(error, PeerError | KeyboardInterrupt)
        self._checkpointing.close(_PATIENCE if own else 0.0)
        if failed and error is not None:
            mpi.fail()
            context.rendezvous.fail(error)
        context.heartbeat.closes(left=failed and isinstance(error, SystemExit))
        self.loop.closed = True
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


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


# --- errors of a script ----------------------------------------------------------------------------


def explained(error: BaseException, models: Sequence[WrappedModel]) -> RunError | None:
    """Return a clearer error for an error of torch that has a known cause; `None` for others.

    `error`: an exception that ended the run. `models`: models of the run.
    """
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
    """Set `sys.excepthook` so that Lockstep's errors are printed as one message without a traceback."""
    if sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, LockstepError):
            sys.stderr.write(f"lockstep: error: {error}\n")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
