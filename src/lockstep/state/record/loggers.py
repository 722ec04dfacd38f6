"""Loggers: TensorBoard, Weights & Biases, MLflow, and objects of the script."""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import UsageError
from lockstep.state.files.atomic_file import atomic_write
from lockstep.state.record.given import Given
from lockstep.state.record.wandb_files import last_logged

#: Each is also the package that it needs, and an extra of ours.
NAMES = ("tensorboard", "wandb", "mlflow")

#: As many metrics as MLflow takes at once.
_MLFLOW_BATCH = 1000
#: Told what users should know.
Say = Callable[[str], None]


@runtime_checkable
class Logger(Protocol):
    """What a script may give a run as a logger."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of a step; each step once, in their order."""


class Backend(abc.ABC):
    """A logger that is kept open over a run.

    Attributes:
        keeps: whether it has values for certain only after `flush`.
        held: what a logger has of earlier generations that may lose values after `flush`.
    """

    keeps: bool = True
    held: Given | None = None

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the values of a step."""

    def flush(self) -> None:  # noqa: B027 - some have written what they were given
        """Let no later kill lose what was logged."""

    def close(self, *, failed: bool) -> None:  # noqa: B027 - an object of the script's is not ours to close
        """Write everything, and say how the run ended."""


def check(loggers: Sequence[Any], _: str = "") -> None:
    """Refuse what is no logger; each message names the logger, whatever they were given as.

    Raises:
        UsageError: naming it, or what is not installed.
    """
    for logger in loggers:
        if isinstance(logger, str) and logger not in NAMES:
            raise UsageError(f"a logger is {logger!r}; expected one of {', '.join(NAMES)}")
        if not isinstance(logger, str) and not isinstance(logger, Logger):
            raise UsageError(
                f"a logger is of type {type(logger).__name__}; expected a name or an object with "
                "log(values, step)",
                hint=f"names are {', '.join(NAMES)}",
            )
        if isinstance(logger, str) and importlib.util.find_spec(logger) is None:
            raise UsageError(
                f"logger {logger} needs the package {logger}, which is not installed",
                hint=f"pip install 'torch-lockstep[{logger}]'",
            )


def make(
    logger: Any, directory: Path, name: str, about: Mapping[str, Any], first: int, say: Say
) -> Backend:
    """Return a logger, ready to take values.

    Args:
        logger: its name, or an object with `log`.
        directory: where it may keep files.
        name: of the run.
        about: identity of the run.
        first: the first step that is logged now: what a kill left of later ones does not count.
        say: tells the user where values go.
    """
    match logger:
        case "tensorboard":
            return TensorBoard(directory / "tensorboard", first)
        case "wandb":
            return WandB(directory, name, about, say)
        case "mlflow":
            return MLflow(directory, name, about)
    return _Own(logger)


class TensorBoard(Backend):
    """Writes event files.

    Args:
        directory: where.
        first: what an earlier generation wrote of this step and later ones is dropped.
    """

    def __init__(self, directory: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write them to the disk."""
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


class WandB(Backend):
    """Logs to Weights & Biases: offline where no key is known, into the run directory.

    W&B's own process writes what it was given every 15 s, and loses the rest if the main rank is killed.
    A later generation therefore asks its files, and its server, what they hold.

    Args:
        directory: where offline runs lie.
        name: of the project.
        about: the configuration that is shown.
        say: told once if the run is offline, however often ranks restart.
    """

    def __init__(self, directory: Path, name: str, about: Mapping[str, Any], say: Say) -> None:
        import wandb

        own = directory / "wandb"
        has_files = any(own.glob("offline-run-*"))
        chosen: Any = os.environ.get("WANDB_MODE")
        if chosen is None and not wandb.login(prompt=False):
            chosen = "offline"
            if not has_files:
                say(
                    "lockstep: wandb has no key: it logs offline, to be sent with "
                    f"`wandb sync {own}/offline-run-*`"
                )
        self._run = wandb.init(
            project=name,
            # The same in each generation, so that they are one run of W&B's.
            id=_once(directory / "wandb-run", lambda: secrets.token_hex(8)),
            resume="allow",
            dir=directory,
            config=dict(about),
            mode=chosen,
            settings=wandb.Settings(silent=True, console="off"),
        )
        if self._run.resumed and not self._run.offline:
            self.held = self._run.starting_step, frozenset()
        elif has_files:  # they may have been sent, and removed
            self.held = last_logged(own)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values."""
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))


class MLflow(Backend):
    """Logs to the tracking server of `MLFLOW_TRACKING_URI`, or to SQLite in the run directory.

    Args:
        directory: where that lies.
        name: of the experiment.
        about: what is logged as parameters.
    """

    def __init__(self, directory: Path, name: str, about: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._metrics: list[Any] = []
        self._id = self._find(directory / "mlflow-run", name, about)

    def _find(self, place: Path, name: str, about: Mapping[str, Any]) -> str:
        """Return the id of this run's, which an earlier generation may have begun."""
        return _once(place, lambda: self._begin(place.parent.parent.name, name, about))

    def _begin(self, run: str, name: str, about: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run_id: str = self._client.create_run(experiment, run_name=run).info.run_id
        for key, value in about.items():
            self._client.log_param(run_id, key, value)
        return run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep metrics for `flush`: a request for each step could take longer than the step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(key, value, now, step) for key, value in values.items()]

    def flush(self) -> None:
        """Log what was kept."""
        while self._metrics:
            self._client.log_batch(self._id, self._metrics[:_MLFLOW_BATCH])
            del self._metrics[:_MLFLOW_BATCH]

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class _Own(Backend):
    """A logger of the script's own."""

    keeps = False

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Pass values on."""
        self._logger.log(values, step)


def _once(place: Path, make: Callable[[], str]) -> str:
    """Return what a file says; if there is none, write into it what `make` returns."""
    with contextlib.suppress(FileNotFoundError):
        return place.read_text(encoding="utf-8")
    text = make()
    atomic_write(place, text)
    return text
