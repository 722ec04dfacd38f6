"""What a run holds besides its models: world, connection, directory, records."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.data.build import LoaderSettings
from lockstep.data.loader import Loader
from lockstep.data.microbatch import Microbatch
from lockstep.data.randomness import set_key
from lockstep.errors import LockstepError, PeerError
from lockstep.exchange.choose import exactness_of
from lockstep.layout import keys
from lockstep.layout.classes import of_servers, worst
from lockstep.layout.mesh import Mesh
from lockstep.record import report
from lockstep.record.recorder import Recorder
from lockstep.record.settings import RecordSettings
from lockstep.record.stacks import Frame
from lockstep.settings import Settings
from lockstep.strategies.model_context import ModelContext
from lockstep.strategies.precision import check_precision
from lockstep.strategies.wrapped_model import WrappedModel
from lockstep.training import fingerprint
from lockstep.training import parallel_dims as dims
from lockstep.training.averages import Averages
from lockstep.training.checkpointing import Checkpointing
from lockstep.training.collective_check import CollectiveCheck, RankOrder
from lockstep.training.continuation import Continuation
from lockstep.training.digest import digest
from lockstep.training.divergence import SameData, check_same
from lockstep.training.faults import Faults
from lockstep.training.fingerprint import describe, method_of
from lockstep.training.heartbeat import Heartbeat
from lockstep.training.listeners import Listener
from lockstep.training.loop import Loop
from lockstep.training.memory import Memory, find_slot
from lockstep.training.preemption import Preempted, Signals
from lockstep.training.resume import launch_of, recall
from lockstep.training.scaling import Scaler
from lockstep.training.state import State
from lockstep.training.threads import set_threads
from lockstep.training.watchdog import Watchdog
from lockstep.world import World, mpi
from lockstep.world.connect import connect
from lockstep.world.devices import choose_device, make_deterministic
from lockstep.world.meet import leave, meet

#: Seconds that a checkpoint which is being written has left when the script fails.
_PATIENCE = 10.0


class Session:
    """The life of a run in this process, from meeting the other ranks to leaving them.

    Args:
        settings: what is asked for.
        world: who this process is.
        store: a store that all ranks have, of the script's own.

    Attributes:
        world: who this process is.
        replicas: number of replicas in all.
        formation: where this rank stands among the others.
        groups: the process groups that it is in.
        device: what this rank computes on.
        store: where ranks leave notes for each other.
        group: the process group; `None` on a single rank.
        models: the models that the run holds.
        turns: who goes first.
        loop: where the run stands.
        record: writes what happens, and measures it.
    """

    #: directories that earlier runs of this process have taken
    _directories: ClassVar[set[Path]] = set()
    #: directory of the run before this one, and the process that it was in
    _before: ClassVar[tuple[int, Path] | None] = None
    #: whether a run was asked to end when it had, so that the next one is
    _stops: ClassVar[bool] = False

    def __init__(self, settings: Settings, world: World, store: dist.Store | None = None) -> None:
        self.settings = settings
        self._started = time.monotonic()
        self._meeting = meet(world, store)
        self.world = world = self._meeting.world
        self.standing = Heartbeat.begin(find_slot(os.environ, world), os.environ)
        with self._meeting.telling(), self.standing.meeting("the start of the run"):
            self._run_dir = self._choose_run_dir(self._meeting.number)
            self._launch = launch_of(world, os.environ)
            of = self._meeting, self._run_dir, self._launch
            self._earlier = recall(*of, fresh=settings.fresh)
            mesh = dims.choose_mesh(settings, world)
            self.replicas = self._choose_replicas(mesh)
            self.formation = dims.ParallelDims.of(mesh, world.rank, self.replicas)
            self.device = choose_device(settings.devices, world)
            asked = settings.threads or self._earlier.threads or settings.default_threads
            self.threads = set_threads(asked, self._meeting, self.replicas * mesh.model)
            if settings.exact:
                make_deterministic(self.device)
            check_precision(settings.precision, self.device)
            counts = {"replicas": self.replicas, "threads": self.threads}
            self._identity = describe(settings, **counts, device=self.device.type)
            late = settings.staleness or 0
            self._memory = Memory.find(os.environ, self._meeting, self._identity, late)
            connection = connect(
                self._meeting, self.device, always=dims.needs_group(settings.strategy)
            )
            self.groups = dims.Groups.of(connection.group, mesh, settings.strategy, self.device)
        self.store, self.group = connection.store, connection.group
        self._owns_group = connection.owned
        self.together = CollectiveCheck(self.standing, self.group, self._meeting)
        self.same_data = SameData(self._meeting, exact=settings.exact)
        self.exchange = "none"
        if self.groups.data is not None:
            self.exchange = dims.choose_exchange(settings, self.formation, world, self.device.type)
        self.state = State()
        # Weak, so that a script may make a loader per epoch and let it go.
        self._loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
        self.turns = RankOrder(world, self.store, self.standing)
        self._backwards = False
        self.record = self._open_record()
        self._remember_directory()
        self._watch = self._start_watch()
        try:
            self._begin()
        except BaseException:
            self.record.close(None)
            raise
        self._signals = Signals(self._keeper.stop, patient=world.environment == "lockstep")
        set_key(keys.derive(settings.seed, keys.INIT))

    def _begin(self) -> None:
        """Make the loop, and let it begin, or go on from the newest state."""
        self._averages = Averages(self.holding(-1), self.models, self.standing)
        listeners = self._listeners()
        self.loop = Loop(self.settings.seed, self.replicas, self.models, listeners)
        self.loop.followed = self._averages.followed
        self.record.bind(self.loop, self.digests)
        self._faults = Faults.of(os.environ, self.world)
        with self._meeting.telling():
            self._keeper = self._keep()
        if self.loop.is_on_the_way:
            self._faults.go_on(self.loop.resumed)
        self.loop.at_point, self.loop.at_epoch = self._at_point, self.state.epoch_begins
        self.loop.warn = self.record.warn

    def _listeners(self) -> list[Listener]:
        """Return who is told of steps and loops."""
        listeners: list[Listener] = [self.record, self.standing, self._averages]
        if self._watch is not None:
            listeners.append(self._watch)
        if self.settings.precision == "fp16":
            self.state.scaler = Scaler(self.group, self.device, self.record.warn, self.record.log)
            listeners.append(self.state.scaler)
        return listeners

    @property
    def models(self) -> list[WrappedModel]:
        """The models that the run holds."""
        return self.state.models

    def _choose_replicas(self, mesh: Mesh) -> int:
        asked = self.settings
        self._says_replicas = asked.replicas or self._earlier.replicas or asked.default_replicas
        return self._says_replicas or mesh.data

    def _keep(self) -> Checkpointing:
        continuation = Continuation(
            meeting=self._meeting,
            group=self.group,
            memory=self._memory,
            record=self.record,
            state=self.state,
            loop=self.loop,
            standing=self.standing,
            is_split=self.groups.mesh is not None,
        )
        is_new = self._earlier.is_new and self.world.generation == 0
        return continuation.begin(self.settings, asdict(self._identity), is_new=is_new)

    def _at_point(self) -> None:
        self._faults.after_step(self.loop.steps)
        self._keeper.at_point()

    def save(self, best: float | None) -> None:
        """Save the state: in a loop when the script is done with this batch, elsewhere now."""
        if self.loop.is_in_loop:
            # Once per batch: a condition on run.step holds on some ranks' earlier microbatches only.
            if self.loop.acts_now() and not self.loop.is_on_the_way:
                self._keeper.ask(best)
        elif not self.loop.passes_save():
            self._keeper.ask(best)
            self.loop.point()

    @property
    def exactness(self) -> str:
        """`exact`, `close` where another layout rounds otherwise, or `approximate`."""
        exchange = exactness_of(self.exchange, self.formation.forest)
        servers = of_servers(self.settings.strategy, self.settings.staleness, self.device.type)
        return worst([exchange, servers, *(model.exactness for model in self.models)])

    @property
    def mesh(self) -> DeviceMesh:
        """Torch's view of the ranks, where models are sharded or spread."""
        return self.groups.require_mesh(self.settings.strategy)

    def holding(self, number: int) -> ModelContext:
        """Return what a strategy is to hold model `number` with."""
        return ModelContext(
            number=number,
            device=self.device,
            block=self.formation.block,
            replicas=self.replicas,
            forest=self.formation.forest,
            group=self.groups.data,
            mesh=self.groups.mesh,
            store=self.store,
            exchange=self.exchange,
            sync_every=self.settings.sync_every,
            exchanging=self.record.pace.exchanging(self.device.type),
            exact=self.settings.exact,
            say=self.record.say,
            warn=self.record.warn,
        )

    @property
    def directory(self) -> Path:
        """Where the run keeps its records."""
        return self.record.directory

    def _choose_run_dir(self, number: int) -> Path | None:
        run_dir = self.settings.run_dir
        if run_dir is not None and number > 0 and run_dir in self._directories:
            # The launcher names one directory; further runs of the script go below it.
            run_dir /= f"{self.settings.name}-{number + 1}"
        return run_dir

    def _open_record(self) -> Recorder:
        with self._meeting.telling():
            if not self.world.is_main:  # which may refuse the directory
                self._meeting.wait(["directory"], "begin")
            return Recorder(
                self._record_settings(), self._identity, self.world, self._meeting.store
            )

    def _remember_directory(self) -> None:
        if self.settings.run_dir is not None:
            self._directories.add(self.settings.run_dir)
        Session._before = (os.getpid(), self.record.directory)

    def _record_settings(self) -> RecordSettings:
        asked = self.settings
        pid, before = self._before or (0, None)
        return RecordSettings(
            name=asked.name,
            run_dir=self._run_dir,
            fresh=asked.fresh and not self._earlier.is_ours,
            progress=asked.progress,
            trace=asked.trace,
            generation=self._earlier.generations,
            launch=self._launch,
            restarted=self._earlier.is_ours,
            repeats=self.formation.column > 0,
            before=before if pid == os.getpid() else None,
            device=self.device,
            loggers=asked.loggers,
            method=method_of(asked, self.exchange, alone=self.group is None),
        )

    def _start_watch(self) -> Watchdog | None:
        if self.group is None:
            return None
        ours = self.world.environment == "lockstep"
        return Watchdog(self._meeting, self.standing, self._tell_launcher, watched=ours)

    def _tell_launcher(self, error: LockstepError, frame: Frame | None) -> None:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and self.world.environment == "lockstep":
            told = report.describe(error, self.world.rank, home=None)
            if frame is not None:
                told = replace(told, file=frame.file, line=frame.line, function=frame.function)
            report.write(told, Path(path))

    def open(self) -> None:
        """Say what runs, on the main rank, and listen to signals from here on."""
        self._signals.listen()
        if self._memory is not None:
            self._memory.opened()
        if self._stops:
            self._keeper.stop()
        name = self.settings.name
        exchange = "" if self.group is None else f", exchange {self.exchange}"
        self.record.say(
            f"{fingerprint.title(name, self.exactness, self.replicas, self.world.size)}, {self.device.type}"
            f"{exchange}, threads {self.threads}, {self.record.shown_directory}{self.record.origin}"
        )
        if self._says_replicas is None and self.replicas > 1:
            self.record.say(fingerprint.unset(name, self.replicas))

    # --- what the run asks for -------------------------------------------------------------------

    def register(self, name: str, value: Any) -> None:
        """Count `value` as state of the run."""
        self.state.register(name, value)
        self._averages.add(value)

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

    def loader_made(self, loader: Loader, dataset: Any, settings: LoaderSettings) -> None:
        """Take note of a new loader."""
        self._loaders.add(loader)
        self.record.loader_made(loader, dataset, settings)

    def passing(self) -> contextlib.AbstractContextManager[None]:
        """Return what is entered while ranks that hold one model wait for each other."""
        return self._passing(self.formation.ranks_of_row)

    def gathering(self) -> contextlib.AbstractContextManager[None]:
        """Return what is entered while all ranks wait for each other's parts in a backward pass."""
        return self._passing(range(self.world.size))

    def _passing(self, row: range) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._watch is None else self._watch.passing(row)

    def after_backward(self) -> None:
        """Take note that gradients have met."""
        if self._watch is not None:
            self._watch.backward_ends()

    def before_backward(
        self, microbatch: Microbatch, loss: torch.Tensor, models: Sequence[WrappedModel]
    ) -> None:
        """Take note of a loss, and that its gradients are about to meet."""
        if self._watch is not None:
            places = [self.models.index(model) for model in models]
            self._watch.backward_begins(microbatch, places)
        self._backwards = True
        if not self.loop.is_on_the_way:
            self.record.before_backward(microbatch, loss)
            self._faults.before_backward(self.loop.steps + 1)

    def log(self, values: dict[str, Any]) -> None:
        """Record values of the current step."""
        if not self.loop.is_on_the_way:
            self.record.log(values)

    def print(self, text: str) -> None:
        """Print on the main rank, but not what it has printed before."""
        if not self.loop.is_entered_again:
            self.record.print(text)

    def epoch_ends(self, epoch: int) -> None:
        """The body of `for epoch in run.epochs(…)` is done with an epoch."""
        self.record.epoch_ends(epoch)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.group is not None:
            with self.together.meeting("run.barrier"):
                dist.barrier(group=self.group)

    # --- the end ---------------------------------------------------------------------------------

    def script_ends(self) -> None:
        """The script is done: what it wanted to be saved is on disk when this returns.

        Raises:
            CheckpointError: if it cannot be written, or the script never came to where it was resumed.
        """
        self.loop.check_arrived()
        self.loop.come_together()
        self._keeper.finish()
        for number, model in enumerate(self.models):
            self.record.traffic(number, model.ends())

    def finish(self, own_digest: str, used: dict[str, int]) -> None:
        """Agree with the other ranks on the result, and record it with the memory that was `used`.

        Raises:
            DivergenceError: if a rank holds other bits.
            PeerError: if a rank does not come to its end.
        """
        if self._watch is not None:
            self._watch.run_ends()
        self.record.script_ends()
        with self.standing.meeting("the end of the run"):
            if self.group is not None:
                check_same(self._meeting, own_digest, self.digests, exact=self.settings.exact)
        if self._watch is not None:
            self._watch.close()  # from here on nobody waits for another rank
        if self._backwards and not self.loop.steps:
            self.record.warn(
                "lockstep: warning: gradients were computed, but no optimizer of the run has stepped; "
                "pass it through run.optimizer(…)"
            )
        self.record.finish(own_digest, time.monotonic() - self._started, used)
        self._keeper.leave_behind()

    def close(self, error: BaseException | None) -> None:
        """Give back everything; after an error nothing that would wait for other ranks."""
        self._signals.close()
        Session._stops = error is None and self._keeper.stop_asked
        failed = error is not None and not isinstance(error, Preempted)
        # First: once the others know of the error, they write no more.
        own = failed and not isinstance(error, PeerError | KeyboardInterrupt)
        self._keeper.close(_PATIENCE if own else 0.0)
        if failed and error is not None:
            mpi.fail()
            self._meeting.fail(error)
        self.standing.closes(left=failed and isinstance(error, SystemExit))
        self.loop.close()
        if self._watch is not None:
            self._watch.close()
        for model in self.models:
            model.close()
        for loader in self._loaders:
            loader.close()
        try:
            if isinstance(error, Preempted):
                self.record.preempted(error.step)
            self.record.close(error if failed else None)
        finally:
            if self._owns_group and not failed:
                leave(self._meeting)
                dist.destroy_process_group()
