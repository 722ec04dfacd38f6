"""`Recorder`: writes a run's records (`run.json`, events, step record, trace), shows progress."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep.engine.data.build import LoaderSettings
from lockstep.engine.data.description import Description
from lockstep.engine.data.loader import Loader
from lockstep.engine.data.microbatch import LoopKey, Microbatch
from lockstep.errors import RunDirectoryError, shortened
from lockstep.state.files import directory as directories
from lockstep.state.files import lock, run_file
from lockstep.state.files.lock import DirectoryLock, LockOwner
from lockstep.state.files.run_file import Identity
from lockstep.state.record import reproducibility, trainjob
from lockstep.state.record.audits import Audits
from lockstep.state.record.events import Events, copied
from lockstep.state.record.forwarding import DIRECTORY, Forwarding
from lockstep.state.record.monitor import Monitor
from lockstep.state.record.pace import Pace
from lockstep.state.record.progress_bar import ProgressBar
from lockstep.state.record.provenance import Commit, provenance
from lockstep.state.record.settings import RecordSettings
from lockstep.state.record.steps import DIRECTORY as STEPS
from lockstep.state.record.steps import LOSS, StepRecord
from lockstep.state.record.trace import Trace
from lockstep.world import accelerator
from lockstep.world.model import World

#: Number of loaders whose data is recorded; a script may make loaders in every epoch.
_LOADERS = 64
#: Seconds between two writes of `run.json` for audits that found no difference.
_AUDIT_SECONDS = 1.0


class TrainingProgress(Protocol):
    """Protocol with those attributes of the training loop's state that `Recorder` reads."""

    epoch: int
    epochs: int

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the run has done."""

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch that is being computed; `None` between microbatches."""

    @property
    def is_replaying(self) -> bool:
        """Whether a resumed run is still replaying: calls of the script return saved results."""


class Recorder:
    """Writes a run's records (`run.json`, events, step record, trace) and shows its progress.

    Raises:
        RunDirectoryError: if the run directory cannot be used.
    """

    _progress: TrainingProgress
    _digests: Callable[[], Mapping[str, str]]

    def __init__(
        self, settings: RecordSettings, identity: Identity, world: World, store: dist.Store
    ) -> None:
        self._settings, self._identity, self._world = settings, identity, world
        self._bar = ProgressBar(shown=world.is_main and settings.progress)
        self._lock: DirectoryLock | None = None
        self._commit = Commit() if world.is_main else None
        self.directory = self._agree_on_directory(store)
        if apart := lock.nodes_apart(store, self.directory, world):
            self.warn(apart)
        self._events = Events(self.directory, world.rank)
        self.steps: StepRecord | None = None
        if settings.hash_every != 0:
            self.steps = StepRecord(self.directory, world.rank, settings.generation)
        self._trace: Trace | None = None
        if settings.trace:
            self._trace = Trace(settings.trace, world.rank, settings.generation, settings.number)
        self.pace = Pace(alone=world.size == 1)
        self._monitor: Monitor | None = None
        self._loggers: Forwarding | None = None
        self._lengths: dict[int, int] = {}  # global batches of each loader that is no stream
        self._stepped: Microbatch | None = None  # of the newest step
        self._loops: list[bool] = []  # for each loop that is open, whether it trains
        recorded = None if settings.fresh or not world.is_main else run_file.read(self.directory)
        recorded = recorded or {}
        self._generations: list[dict[str, Any]] = list(recorded.get("generations", []))
        data = recorded.get("data")  # description of each loader's data
        self._data: dict[str, Any] = data if isinstance(data, dict) else {}
        self._provenance: dict[str, Any] = {}
        #: What the run's audits have found, also before a restart.
        self.audits = Audits.of(settings.audits)
        self._audits_written = 0.0
        self._without_loss: dict[int, Microbatch] = {}  # the newest of each loader
        self.origin = ""  # the state from which the run resumes, for a message
        self._has_finished = False

    def begin(self, step: int, source: str | None) -> None:
        """Write the start of the run, or its resumption after step `step` from the state in `source`.

        `source` is a checkpoint's path, `memory` (a snapshot), or `rank K` for a state sent by rank K.
        """
        self.audits.begin(step)
        if self._trace is not None:
            self._trace.begin(step)
        world, device = self._world, self._settings.device
        self._events.add(
            kind="start",
            generation=self._settings.generation,
            rank=world.rank,
            ranks=world.size,
            node=world.node_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=device.type,
            device_name=accelerator.name(device),
            **self._settings.method,
            step=step,
        )
        self._monitor = Monitor(
            device,
            lambda sample: self._events.put(kind="machine", step=self._progress.steps, **sample),
        )
        if source is not None:
            self._events.add(kind="resume", step=step, source=source)
            name = "in-memory snapshot" if source == "memory" else source.rpartition("/")[2]
            self.origin = f", resuming after step {step} ({name})"
        if world.is_main and (self._settings.loggers or trainjob.has_server(os.environ)):
            self._loggers = Forwarding(
                self._settings.loggers,
                self.directory,
                asdict(self._identity),
                ranks=world.size,
                resumed=step,
                say=self._bar.say,
            )
        self._events.flush()
        if self._commit is not None:
            generation = {
                "ranks": world.size,
                "nodes": world.node_count,
                "environment": world.environment,
                "time": round(time.time(), 3),
            }
            resumed = {} if source is None else {"step": step, "source": source}
            self._generations.append(generation | resumed)
            chosen, number = self._settings.chosen, self._settings.number
            self._provenance = provenance(chosen, device, number, self._commit)
            self._write("running")

    def _agree_on_directory(self, store: dist.Store) -> Path:
        if self._world.is_main:
            path = directories.create(self._settings.run_dir, self._settings.name)
            settings = self._settings
            owner = LockOwner.of(self._world.environment, os.environ, settings.launch)
            self._lock = DirectoryLock(path, owner)
            run_file.check(path, self._identity, fresh=settings.fresh, restarted=settings.restarted)
            if self._settings.fresh:
                for part in ("events", "checkpoints", STEPS, DIRECTORY):
                    shutil.rmtree(path / part, ignore_errors=True)
                run_file.forget(path)
            self._link_previous(path)
            store.set("directory", str(path))
        path = Path(store.get("directory").decode())
        if self._world.node_rank == 0 or path.is_dir():
            return path
        # A node that does not share the main rank's disk writes records to its own directory of that name.
        return directories.create(self._settings.run_dir, self._settings.name, stamp=path.name)

    def _link_previous(self, path: Path) -> None:
        """Write `path`, this run's directory, into the `run.json` of the script's previous run, if any."""
        before = self._settings.before
        try:
            if before is not None:
                run_file.link(before, path)
        except RunDirectoryError as error:
            self.warn(
                f"lockstep: warning: {error.message}: if this run is interrupted, the same command will "
                "refuse that one, since it is finished"
            )

    @property
    def shown_directory(self) -> str:
        """The run directory, relative to the working directory if it lies below that."""
        return str(directories.short(self.directory))

    def bind(self, progress: TrainingProgress, digests: Callable[[], Mapping[str, str]]) -> None:
        """Set the loop's progress, and the function that returns digests of models and objects by name."""
        self._progress, self._digests = progress, digests

    def loader_made(self, loader: Loader, dataset: Any, settings: LoaderSettings) -> None:
        """Write checksums of a new loader's data to `run.json`; warn if they differ from earlier ones."""
        with contextlib.suppress(TypeError):  # a stream
            self._lengths[loader.number] = len(loader)
        if self._trace is not None:
            length = len(dataset) if hasattr(dataset, "__len__") else None
            exhaustive = settings.any_sampler is None and not settings.drop_last
            self._trace.loader(loader.number, length, exhaustive=exhaustive)
        if self._world.is_main and loader.number < _LOADERS:
            number, data = str(loader.number), Description(dataset, settings.any_sampler).parts()
            recorded = self._data.get(number)
            if recorded != data:
                if isinstance(recorded, dict):
                    self.warn(reproducibility.changed_data(number, recorded, data))
                self._data[number] = data
                self._write("running")

    def loop_begins(self, loop: LoopKey) -> None:
        """Begin to measure the pace of an outermost loop with gradients, and show its progress bar."""
        trains = torch.is_grad_enabled() and not any(self._loops)
        self._loops.append(trains)
        if trains:
            self.pace.begin()
        if trains and not self._progress.is_replaying:
            self._bar.epoch_begins(*self._shown_epoch(loop.epoch), self._lengths.get(loop.loader))

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Write the loader's previous microbatch to the trace, if it had no backward pass."""
        if self._trace is not None:
            self._trace_seen(self._trace, microbatch.loader)
            self._without_loss[microbatch.loader] = microbatch

    def _trace_seen(self, trace: Trace, loader: int) -> None:
        seen = self._without_loss.pop(loader, None)
        is_new = not (self._settings.repeats or self._progress.is_replaying)
        if seen is not None and seen.size and is_new:
            trace.seen(self._progress.steps, seen)

    def before_backward(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        """Write a microbatch's loss and samples to the trace and to the step record."""
        if self.steps is not None and not self._settings.repeats:
            samples = microbatch.indices[: microbatch.size]
            step, replica = self._progress.steps + 1, microbatch.replica
            self.steps.add(step, LOSS, loss, replica=replica, samples=samples)
        if self._trace is None:
            return
        if not self._settings.repeats:
            self._trace.microbatch(self._progress.steps + 1, microbatch, loss)
        self._without_loss.pop(microbatch.loader, None)

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Write the digests of models and objects after step `step` to the trace; advance the bar."""
        if self._trace is not None:
            self._trace.step(step, self._digests())
        self._bar.step(microbatch.total)
        self._stepped = microbatch
        if self.pace.step(microbatch.total):
            self._window_ends(step)

    def _window_ends(self, step: int) -> None:
        """Write an event of kind `pace`: times of the steps since the previous event of this kind."""
        window, progress, newest = self.pace.window(), self._progress, self._stepped
        if window is not None and newest is not None:
            epochs = {"epoch": progress.epoch, "epochs": progress.epochs}
            batches = {"batch": newest.step + 1, "batches": self._lengths.get(newest.loader)}
            self._events.add(kind="pace", step=step, **epochs, **batches, **window)

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        """Write a loop's end to the trace (`early`: before the last batch); if it trains, its pace, too."""
        trains = self._loops.pop()
        if self._trace is not None:
            self._trace_seen(self._trace, loop.loader)
        if self._progress.is_replaying:
            return
        if self._trace is not None:
            self._trace.loop(loop, complete=not early)
        if trains:
            self._window_ends(self._progress.steps)
            self._bar.epoch_ends(*self._shown_epoch(loop.epoch))

    def _shown_epoch(self, epoch: int) -> tuple[int, int]:
        """Return epoch and number of epochs for the progress bar; outside of `run.epochs`, 0 epochs."""
        progress = self._progress
        return (progress.epoch, progress.epochs) if progress.epochs else (epoch, 0)

    def epoch_ends(self, epoch: int) -> None:
        """Write an event for the end of epoch `epoch`, and all pending events, to disk."""
        self._events.add(kind="epoch", epoch=epoch)
        self._events.flush()

    def log(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add an event of kind `log`: `values`, epoch, step and replica; show `values` in the bar.

        Returns the values as they are recorded: a tensor of one number on the CPU is this number.
        """
        kept, progress = copied(values), self._progress
        fields: dict[str, Any] = {"epoch": progress.epoch, "step": progress.steps, "replica": None}
        if (inside := progress.microbatch) is not None:
            fields["step"] += 1  # the microbatch's step is not done yet
            fields["replica"], fields["weight"] = inside.replica, inside.weight
        fields.update(kept)
        self._events.add(kind="log", **fields)
        self._bar.log(kept)
        return kept

    def audit_agrees(self, step: int) -> None:
        """Record an audit of step number `step` that found no difference; write it once a second."""
        self.audits.agrees(step)
        now = time.monotonic()
        if self._world.is_main and now - self._audits_written >= _AUDIT_SECONDS:
            self._audits_written = now
            self._write("running")

    def audit_differs(self, step: int, **who: Any) -> None:
        """Record that an audit of `step` found a difference, and the rank (`who`) that caused it."""
        found = self.audits.differs(step, **who)
        if self._world.is_main:
            self._events.add(kind="audit", **found)
            self._events.flush()
            self._write("running")

    def traffic(self, model: int, moved: Mapping[str, int]) -> None:
        """Add an event with `moved`, the bytes sent and received for a model, unless it is empty."""
        if moved:
            self._events.add(kind="traffic", model=model, **moved)

    def checkpoint(self, step: int, name: str, seconds: float, best: float | None) -> None:
        """Add an event for a checkpoint, written after step `step`; any thread may call this."""
        self._events.put(
            kind="checkpoint", step=step, name=name, seconds=round(seconds, 3), best=best
        )

    def flush(self) -> None:
        """Write all pending events and entries of the step record, so that a kill cannot lose them."""
        self._events.flush()
        if self.steps is not None:
            self.steps.flush()

    def say(self, text: str) -> None:
        """Show a message on the main rank's standard error, unless progress is off."""
        if self._settings.progress:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Show a warning on the main rank's standard error, even if progress is off."""
        if self._world.is_main:
            self._bar.say(text)

    def warn_anywhere(self, text: str) -> None:
        """Show a warning on this rank's standard error, for problems that only this rank has."""
        self._bar.say(text)

    def print(self, text: str) -> None:
        """Print `text`, a line that the script prints, on the main rank's standard output."""
        if self._world.is_main:
            self._bar.print(text)

    def script_ends(self) -> None:
        """Write all pending records to disk, and the final digests to the trace.

        Each rank calls this before rank 0 ends the run; then the script may remove the run directory.
        """
        self.flush()
        if self._trace is not None:
            self._trace.end(self._digests())

    def finish(
        self, digest: str, seconds: float, used: Mapping[str, int], settings: Sequence[str] | None
    ) -> None:
        """Record the end of the run and this rank's memory; on the main rank, print one line.

        `used` is this rank's memory. `settings` are models and optimizers as text, `None` if the result is
        not exact. The main rank warns of an earlier run with the same settings and a different digest.
        """
        self._events.add(kind="memory", **used)
        self._events.flush()
        if not self._world.is_main:
            return
        steps = self._progress.steps
        result: dict[str, Any] = {"seconds": round(seconds, 3), "digest": digest}
        if settings is not None:
            settings = [*settings, str(steps), str(self._data)]
            known = result["fingerprint"] = reproducibility.fingerprint(self._identity, settings)
            ranks = self._world.size
            if line := reproducibility.other_digest(self.directory, known, digest, ranks):
                self.warn(line)
        self._write("finished", steps=steps, **result)
        self._bar.print(f"lockstep: finished steps={steps} seconds={seconds:.1f} digest={digest}")
        self._has_finished = True

    def preempted(self, step: int) -> None:
        """Record that the run ends after step `step` because of a signal, and print how to resume it."""
        if not self._world.is_main:
            return
        self._write("preempted", step=step)
        if self._world.environment != "lockstep":  # Lockstep's launcher prints this itself
            how = f"LOCKSTEP_RUN_DIR={shlex.quote(self.shown_directory)}"
            # The command line of torchrun, srun or mpiexec is not known here.
            command = ["python", *sys.orig_argv[1:]] if self._world.environment == "single" else []
            how = f"{how} {shlex.join(command)}" if command else f"the same command with {how}"
            self._bar.say(f"lockstep: preempted after step {step}; to continue: {how}")

    def close(self, error: BaseException | None) -> None:
        """Close all files and loggers, and release the lock; write `error`, if any, to `run.json`."""
        if self._trace is not None:
            self._trace.close()
        if self._monitor is not None:
            self._monitor.close()
        try:
            if self.steps is not None:
                self.steps.flush()
            self._events.close()
            if error is not None and self._world.is_main:
                self._write("failed", error=shortened(f"{type(error).__name__}: {error}"))
        except RunDirectoryError:
            if error is None:
                raise  # otherwise the first error counts
        finally:
            # Loggers come last: they may take long, and the run's result does not depend on them.
            if self._loggers is not None:
                self._loggers.close(ended=self._has_finished, failed=error is not None)
            if self._lock is not None:
                self._lock.release(ends=error is None)

    def _write(self, status: str, **more: Any) -> None:
        run_file.write(
            self.directory,
            {
                "format": run_file.FORMAT,
                "identity": asdict(self._identity),
                "launch": self._settings.launch,
                "status": status,
                **more,
                "generations": self._generations,
                "data": self._data,
                "audits": asdict(self.audits),
                "provenance": self._provenance,
                **run_file.kept(self.directory),
            },
        )
