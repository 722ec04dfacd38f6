"""Loggers that get a run's values: TensorBoard, Weights & Biases, MLflow, and objects of the script."""

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

#: Names of loggers; each is also the name of the package that it needs and of an extra of Lockstep.
NAMES = ("tensorboard", "wandb", "mlflow")

#: Number of metrics that one request to MLflow may contain.
_MLFLOW_BATCH = 1000
#: A function that shows a message.
Say = Callable[[str], None]


@runtime_checkable
class Logger(Protocol):
    """Protocol of an object of the user's script that gets the logged values of a run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step; steps come in order."""


class Backend(abc.ABC):
    """Base class of loggers; a logger is made at each (re)start of a run, and closed at the run's end."""

    @abc.abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step."""

    def flush(self) -> None:  # noqa: B027 - some write at once, or when they want to
        """Write all logged values."""

    def close(self, *, failed: bool) -> None:  # noqa: B027 - an object of the script is not closed
        """Write all logged values and the status of the run, and close the logger."""


def check(loggers: Sequence[Any], _: str = "") -> None:
    """Raise an error unless each element of `loggers` is the name of a logger or an object with `log`.

    Raises:
        UsageError: naming a wrong element, or a package that a logger needs and that is not installed.
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
    """Return a `Backend` for `logger`: `"tensorboard"`, `"wandb"`, `"mlflow"`, or an object with `log`.

    Args:
        logger: a name, or an object of the script.
        directory: the directory for files of loggers.
        identity: script, arguments, seed and so on of the run.
        first: the first step of which no value has been forwarded.
        say: shows a message about where values are logged.
    """
    match logger:
        case "tensorboard":
            return TensorBoard(directory / "tensorboard", first)
        case "wandb":
            return WandB(directory, identity, say)
        case "mlflow":
            return MLflow(directory, identity)
    return _UserLogger(logger)


class TensorBoard(Backend):
    """Writes TensorBoard event files.

    Values of step `first` and later steps that an earlier start wrote are hidden by `purge_step`.
    """

    def __init__(self, directory: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write the values as scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the logged scalars to disk."""
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the event file."""
        self._writer.close()


class WandB(Backend):
    """Logs to Weights & Biases, or to files in the run directory if no API key is configured.

    All (re)starts continue one W&B run, which ignores steps that it already has.
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
        # By default W&B writes every 15 s; a kill loses all values since then.
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
        """Log the values to the W&B run."""
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """End the W&B run."""
        self._run.finish(exit_code=int(failed))


class MLflow(Backend):
    """Logs to the MLflow server in `MLFLOW_TRACKING_URI`, or to an SQLite file in the run directory."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        self._metrics: list[Any] = []
        # The MLflow run may exist from before a restart.
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
        """Collect the values, for `flush` to send; one request per step could take longer than a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._metrics += [Metric(key, value, now, step) for key, value in values.items()]

    def flush(self) -> None:
        """Send the collected metrics to MLflow."""
        while self._metrics:
            self._client.log_batch(self._id, self._metrics[:_MLFLOW_BATCH])
            del self._metrics[:_MLFLOW_BATCH]

    def close(self, *, failed: bool) -> None:
        """Set the status of the MLflow run to `FAILED` or `FINISHED`."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class _UserLogger(Backend):
    """Passes logged values to the `log` method of an object of the user's script."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Pass `values` and `step` to the method `log` of the user's logger."""
        self._logger.log(values, step)


def _once(place: Path, make: Callable[[], str]) -> str:
    """Return the text of the file `place`; if it does not exist, write it with the result of `make()`."""
    with contextlib.suppress(FileNotFoundError):
        return place.read_text(encoding="utf-8")
    text = make()
    atomic_write(place, text)
    return text
