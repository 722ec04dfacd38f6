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

#: Each is also the package that it needs, and an extra of ours.
NAMES = ("tensorboard", "wandb", "mlflow")

#: As many metrics as MLflow takes at once.
_MLFLOW_BATCH = 1000
#: Shows a message.
Say = Callable[[str], None]


@runtime_checkable
class Logger(Protocol):
    """An object that a script may give a run as a logger."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take values of a step; steps come in their order."""


class Backend(abc.ABC):
    """A logger that is kept open over a run."""

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take values of a step."""

    def flush(self) -> None:  # noqa: B027 - some write at once, or when they want to
        """Write what was logged."""

    def close(self, *, failed: bool) -> None:  # noqa: B027 - an object of the script's is not ours to close
        """Write everything, and how the run ended."""


def check(loggers: Sequence[Any], _: str = "") -> None:
    """Refuse what is no logger.

    Raises:
        UsageError: naming it, or the package that is not installed.
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
    logger: Any, directory: Path, identity: Mapping[str, Any], first: int, say: Say
) -> Backend:
    """Return a logger, ready to take values.

    Args:
        logger: its name, or an object with `log`.
        directory: where it may keep files.
        identity: of the run.
        first: no value of this step or a later one has been forwarded.
        say: shows where values go.
    """
    match logger:
        case "tensorboard":
            return TensorBoard(directory / "tensorboard", first)
        case "wandb":
            return WandB(directory, identity, say)
        case "mlflow":
            return MLflow(directory, identity)
    return _Own(logger)


class TensorBoard(Backend):
    """Writes event files; what an earlier generation wrote of step `first` and later ones is dropped."""

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

    All generations are one run of W&B's, which takes no step again that it has.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any], say: Say) -> None:
        import wandb

        own = directory / "wandb"
        chosen: Any = os.environ.get("WANDB_MODE")
        if chosen is None and not wandb.login(prompt=False):
            chosen = "offline"
            if not any(own.glob("offline-run-*")):  # once, however often ranks restart
                say(
                    "lockstep: wandb has no key: it logs offline, to be sent with "
                    f"`wandb sync {own}/offline-run-*`"
                )
        # By default W&B writes every 15 s; a kill loses what it has not written.
        settings = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=1)
        self._run = wandb.init(
            project=identity["name"],
            id=_once(directory / "wandb-run", lambda: secrets.token_hex(8)),
            resume="allow",
            dir=directory,
            config=dict(identity),
            mode=chosen,
            settings=settings,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values."""
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=int(failed))


class MLflow(Backend):
    """Logs to the tracking server of `MLFLOW_TRACKING_URI`, or to SQLite in the run directory."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._metrics: list[Any] = []
        # An earlier generation may have begun the run.
        self._id = _once(
            directory / "mlflow-run", lambda: self._begin(directory.parent.name, identity)
        )

    def _begin(self, run: str, identity: Mapping[str, Any]) -> str:
        name = identity["name"]
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run_id: str = self._client.create_run(experiment, run_name=run).info.run_id
        for key, value in identity.items():
            self._client.log_param(run_id, key, value)
        return run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Collect metrics for `flush`: a request for each step could take longer than the step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(key, value, now, step) for key, value in values.items()]

    def flush(self) -> None:
        """Log the collected metrics."""
        while self._metrics:
            self._client.log_batch(self._id, self._metrics[:_MLFLOW_BATCH])
            del self._metrics[:_MLFLOW_BATCH]

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class _Own(Backend):
    """A logger of the script's own."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Pass values on."""
        self._logger.log(values, step)


def _once(place: Path, make: Callable[[], str]) -> str:
    """Return the text of a file; if there is none, write the text that `make` returns."""
    with contextlib.suppress(FileNotFoundError):
        return place.read_text(encoding="utf-8")
    text = make()
    atomic_write(place, text)
    return text
