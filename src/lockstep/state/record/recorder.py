"""`Recorder`: the listener that writes all records of a run and shows its progress."""

from __future__ import annotations

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
from lockstep.engine.data.microbatch import Microbatch
from lockstep.errors import RunDirectoryError, shortened
from lockstep.state.files import directory as directories
from lockstep.state.files import run_file
from lockstep.state.files.lock import DirectoryLock, Owner
from lockstep.state.files.run_file import Identity
from lockstep.state.record import earlier
from lockstep.state.record.events import Events, copied
from lockstep.state.record.forwarding import DIRECTORY, Forwarding
from lockstep.state.record.monitor import Monitor
from lockstep.state.record.pace import Pace
from lockstep.state.record.progress_bar import ProgressBar
from lockstep.state.record.settings import RecordSettings
from lockstep.state.record.trace import Trace
from lockstep.world import accelerator
from lockstep.world.model import World

#: So many loaders have their data recorded; a script may make some in every epoch.
_LOADERS = 64


class Place(Protocol):
    """Where a run stands."""

    epoch: int
    epochs: int

    @property
    def steps(self) -> int:
        """How many updates have happened."""

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch that is worked on, if any."""

    @property
    def is_replaying(self) -> bool:
        """Whether the run does again what has been recorded."""


class Recorder:
    """Writes `run.json`, events and the trace, and shows progress.

    Args:
        settings: what the run is asked to do.
        identity: what the run is.
        world: rank and rendezvous of this process.
        store: through which the main rank names the directory.

    Attributes:
        pace: measures steps, and what they wait for.

    Raises:
        RunDirectoryError: if the directory cannot be used.
    """

    def __init__(
        self, settings: RecordSettings, identity: Identity, world: World, store: dist.Store
    ) -> None:
        self._settings, self._identity, self._world = settings, identity, world
        self._progress = ProgressBar(shown=world.is_main and settings.progress)
        self._lock: DirectoryLock | None = None
        self.directory = self._agree_on_directory(store)
        self._events = Events(self.directory, world.rank)
        self._trace = self._open_trace()
        self.pace = Pace(alone=world.size == 1)
        self._monitor: Monitor | None = None
        self._loggers: Forwarding | None = None
        self._lengths: dict[int, int | None] = {}
        self._stepped: Microbatch | None = None  # of the newest step
        self._loops: list[bool] = []  # whether each of the loops that we are in trains
        self._generations, self._data = self._earlier()
        self._place: Place | None = None
        self._digests: Callable[[], Mapping[str, str]] = dict
        self._without_loss: dict[int, Microbatch] = {}  # the newest of each loader
        self._origin = ""
        self._has_finished = False

    @property
    def origin(self) -> str:
        """From where the run continues, in words; empty for a new one."""
        return self._origin

    def _open_trace(self) -> Trace | None:
        place = self._settings.trace
        return Trace(place, self._world.rank, self._settings.generation) if place else None

    def begin(self, step: int, source: str | None) -> None:
        """Record that the run begins, or resumes after step number `step` from the state in `source`."""
        if self._trace is not None:
            self._trace.begin(step)
        self._events.add(kind="start", **self._start(step))
        self._monitor = Monitor(self._settings.device, self._sampled)
        if source is not None:
            self._events.add(kind="resume", step=step, source=source)
            self._origin = f", resuming after step {step} ({_short(source)})"
        if self._world.is_main and self._settings.loggers:
            self._loggers = self._forward(step)
        self._events.flush()
        if self._world.is_main:
            self._generations.append(self._generation(step, source))
            self._write("running")

    def _forward(self, step: int) -> Forwarding:
        return Forwarding(
            self._settings.loggers,
            self.directory,
            asdict(self._identity),
            ranks=self._world.size,
            resumed=step,
            say=self._progress.say,
        )

    def _start(self, step: int) -> dict[str, Any]:
        """Return the rank, host and process id, for the first event."""
        world, device = self._world, self._settings.device
        return {
            "generation": self._settings.generation,
            "rank": world.rank,
            "ranks": world.size,
            "node": world.node_rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": device.type,
            "device_name": accelerator.name(device),
            **self._settings.method,
            "step": step,
        }

    def _sampled(self, sample: dict[str, Any]) -> None:
        self._events.put(kind="machine", step=self._place.steps if self._place else 0, **sample)

    def _agree_on_directory(self, store: dist.Store) -> Path:
        if self._world.is_main:
            path = directories.create(self._settings.run_dir, self._settings.name)
            settings = self._settings
            owner = Owner.of(self._world.environment, os.environ, settings.launch)
            self._lock = DirectoryLock(path, owner)
            run_file.check(path, self._identity, fresh=settings.fresh, restarted=settings.restarted)
            if self._settings.fresh:
                for part in ("events", "checkpoints", DIRECTORY):
                    shutil.rmtree(path / part, ignore_errors=True)
                run_file.forget(path)
            self._follow(path)
            store.set("directory", str(path))
        path = Path(store.get("directory").decode())
        if self._world.node_rank == 0 or path.is_dir():
            return path
        # A node that doesn't share the main rank's disk keeps its records in a directory of the same name.
        return directories.create(self._settings.run_dir, self._settings.name, stamp=path.name)

    def _follow(self, path: Path) -> None:
        """Tell the run before this one that the script continued."""
        before = self._settings.before
        try:
            if before is not None:
                run_file.follow(before, path)
        except RunDirectoryError as error:
            self.warn(
                f"lockstep: warning: {error.message}: if this run is interrupted, the same command will "
                "refuse that one, since it is finished"
            )

    def _earlier(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the generations that are recorded, and the data of each loader."""
        recorded = run_file.read(self.directory) if self._world.is_main else None
        if recorded is None or self._settings.fresh:
            return [], {}
        data = recorded.get("data")
        return list(recorded.get("generations", [])), data if isinstance(data, dict) else {}

    @property
    def shown_directory(self) -> str:
        """The run directory as a person would type it here."""
        return str(directories.short(self.directory))

    def bind(self, place: Place, digests: Callable[[], Mapping[str, str]]) -> None:
        """Learn where the run stands, and how to take the digests of what it holds, by name."""
        self._place, self._digests = place, digests

    # --- what happens ----------------------------------------------------------------------------

    def loader_made(self, loader: Loader, dataset: Any, settings: LoaderSettings) -> None:
        """Take note of a new loader."""
        self._lengths[loader.number] = _length(loader)
        if self._trace is not None:
            length = len(dataset) if hasattr(dataset, "__len__") else None
            exhaustive = settings.any_sampler is None and not settings.drop_last
            self._trace.loader(loader.number, length, exhaustive=exhaustive)
        if self._world.is_main and loader.number < _LOADERS:
            self._data_made(
                str(loader.number),
                Description(dataset, settings.any_sampler).parts(),
            )

    def _data_made(self, loader: str, data: dict[str, str]) -> None:
        """Record the data of a loader; say so if the run has recorded others."""
        recorded = self._data.get(loader)
        if recorded == data:
            return
        if isinstance(recorded, dict):
            self.warn(earlier.changed_data(loader, recorded, data))
        self._data[loader] = data
        self._write("running")

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """Show a bar for a loop that trains."""
        trains = torch.is_grad_enabled() and not any(self._loops)
        self._loops.append(trains)
        if trains:
            self.pace.begin()
        if trains and self._place is not None and not self._place.is_replaying:
            self._progress.epoch_begins(*self._shown_epoch(epoch), self._lengths[loader])

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Trace the microbatch before this one, where no backward pass has come after it."""
        if self._trace is not None:
            self._trace_seen(self._trace, microbatch.loader)
            self._without_loss[microbatch.loader] = microbatch

    def _trace_seen(self, trace: Trace, loader: int) -> None:
        seen, place = self._without_loss.pop(loader, None), self._place
        if seen is None or not seen.size or self._settings.repeats:
            return
        if place is not None and not place.is_replaying:
            trace.seen(place.steps, seen)

    def before_backward(self, microbatch: Microbatch, loss: torch.Tensor) -> None:
        """Trace a loss and the samples behind it."""
        if self._trace is None:
            return
        if self._place is not None and not self._settings.repeats:
            self._trace.microbatch(self._place.steps + 1, microbatch, loss)
        self._without_loss.pop(microbatch.loader, None)

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Trace the state and move the bar."""
        if self._trace is not None:
            self._trace.step(step, self._digests())
        self._progress.step(microbatch.total)
        self._stepped = microbatch
        if self.pace.step(microbatch.total):
            self._window_ends(step)

    def _window_ends(self, step: int) -> None:
        """Record how fast the last steps were."""
        window, place, newest = self.pace.window(), self._place, self._stepped
        if window is not None and place is not None and newest is not None:
            epochs = {"epoch": place.epoch, "epochs": place.epochs}
            batches = {"batch": newest.step + 1, "batches": self._lengths.get(newest.loader)}
            self._events.add(kind="pace", step=step, **epochs, **batches, **window)

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """Close the bar and write what is pending."""
        trains = self._loops.pop()
        if self._trace is not None:
            self._trace_seen(self._trace, loader)
        if self._place is None or self._place.is_replaying:
            return
        if self._trace is not None:
            self._trace.loop(loader, epoch, round_, complete=not early)
        if trains:
            self._window_ends(self._place.steps)
            self._progress.epoch_ends(*self._shown_epoch(epoch))

    def _shown_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the number of an epoch and how many there are, both of its phase.

        A loader counts its loops through all phases of a script; outside of phases that is all there is.
        """
        place = self._place
        return (place.epoch, place.epochs) if place is not None and place.epochs else (epoch, 0)

    def epoch_ends(self, epoch: int) -> None:
        """Write what is pending."""
        self._events.add(kind="epoch", epoch=epoch)
        self._events.flush()

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the current step."""
        kept = copied(values)
        if place := self._place:
            # Inside a microbatch the step that it belongs to is not done yet.
            where: dict[str, Any] = {"epoch": place.epoch, "step": place.steps, "replica": None}
            if (inside := place.microbatch) is not None:
                where["step"] += 1
                where |= {"replica": inside.replica, "weight": inside.weight}
            self._events.add(kind="log", **(where | kept))
        self._progress.log(kept)

    def traffic(self, model: int, moved: Mapping[str, int]) -> None:
        """Record how many bytes this rank has moved for a model, where they are counted."""
        if moved:
            self._events.add(kind="traffic", model=model, **moved)

    def checkpoint(self, step: int, name: str, seconds: float, best: float | None) -> None:
        """Record, from any thread, that a checkpoint was written in so many seconds."""
        self._events.put(
            kind="checkpoint", step=step, name=name, seconds=round(seconds, 3), best=best
        )

    def flush(self) -> None:
        """Write what is pending: no kill loses it from here on."""
        self._events.flush()

    def say(self, text: str) -> None:
        """Show how the run gets on, on the main rank's standard error; not where progress is off."""
        if self._settings.progress:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Show what must not be missed, on the main rank's standard error, progress or not."""
        if self._world.is_main:
            self._progress.say(text)

    def warn_anywhere(self, text: str) -> None:
        """Show what must not be missed and only this rank may know, on its standard error."""
        self._progress.say(text)

    def print(self, text: str) -> None:
        """Print a line of the script's on the main rank, on standard output."""
        if self._world.is_main:
            self._progress.print(text)

    # --- the end ---------------------------------------------------------------------------------

    def script_ends(self) -> None:
        """Trace the state at the end of the script, and write what is pending: the main rank reads it."""
        self._events.flush()
        if self._trace is not None:
            self._trace.end(self._digests())

    def finish(
        self, digest: str, seconds: float, used: Mapping[str, int], settings: Sequence[str] | None
    ) -> None:
        """Record how the run ended, and say so in one line; of each rank, the memory that it used.

        With `settings` (of models and optimizers) an earlier run of the same has to have the same digest.
        """
        self._events.add(kind="memory", **used)
        self._events.flush()
        if not self._world.is_main:
            return
        steps = self._place.steps if self._place else 0
        result: dict[str, Any] = {"seconds": round(seconds, 3), "digest": digest}
        if settings is not None:
            settings = [*settings, str(steps), str(self._data)]
            known = result["fingerprint"] = earlier.fingerprint(self._identity, settings)
            if line := earlier.other_digest(self.directory, known, digest):
                self.warn(line)
        self._write("finished", steps=steps, **result)
        self._progress.print(
            f"lockstep: finished steps={steps} seconds={seconds:.1f} digest={digest}"
        )
        self._has_finished = True

    def preempted(self, step: int) -> None:
        """Record that the run was asked to end after step number `step`, and can resume from there."""
        if not self._world.is_main:
            return
        self._write("preempted", step=step)
        if self._world.environment != "lockstep":  # a launcher says it itself
            how = f"LOCKSTEP_RUN_DIR={shlex.quote(self.shown_directory)}"
            # What started the ranks of torchrun, srun and mpiexec is not known here.
            command = ["python", *sys.orig_argv[1:]] if self._world.environment == "single" else []
            how = f"{how} {shlex.join(command)}" if command else f"the same command with {how}"
            self._progress.say(f"lockstep: preempted after step {step}; to continue: {how}")

    def close(self, error: BaseException | None) -> None:
        """Close all files and loggers; record an error on the main rank."""
        if self._trace is not None:
            self._trace.close()
        if self._monitor is not None:
            self._monitor.close()
        try:
            self._events.close()
            if error is not None and self._world.is_main:
                self._write("failed", error=shortened(f"{type(error).__name__}: {error}"))
        except RunDirectoryError:
            if error is None:
                raise  # otherwise the first error is the one to tell
        finally:
            # Last: it may take its time, and what becomes of the run does not depend on it.
            if self._loggers is not None:
                self._loggers.close(ended=self._has_finished, failed=error is not None)
            if self._lock is not None:
                self._lock.release(ends=error is None)

    def _generation(self, step: int, source: str | None) -> dict[str, Any]:
        world = self._world
        generation = {
            "ranks": world.size,
            "nodes": world.node_count,
            "environment": world.environment,
            "time": round(time.time(), 3),
        }
        return generation if source is None else {**generation, "step": step, "source": source}

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
                **run_file.kept(self.directory),
            },
        )


def _short(source: str) -> str:
    """Return a source as users know it: a checkpoint by its name."""
    if source == "memory":
        return "in-memory snapshot"
    return Path(source).name if "/" in source else source


def _length(loader: Loader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None  # a stream
