"""`GlobalResults`: values of `self.log` in `training_step`, reduced over the replicas of a global batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import Metric

from lockstep.errors import StepError
from lockstep.integrations.lightning_metrics import StepMetrics
from lockstep.run import Run

#: Name of the hook, name of the value, the value, and arguments of `self.log`.
_Entry = tuple[str, str, Any, dict[str, Any]]


class GlobalResults(_ResultCollection):
    """Lightning's collection of logged values, in which each name gets one value per global batch.

    While a microbatch is computed, logged values are collected. `taken` returns them in a form that
    `run.sum` adds up over replicas; `apply` logs the means, sums, minima or maxima.
    """

    def __init__(self, run: Run, metrics: StepMetrics) -> None:
        super().__init__(training=True)
        self._run, self._metrics = run, metrics
        self._own = threading.local()  # replicas may run in threads
        self._settings: dict[str, _Entry] = {}

    @property
    def _entries(self) -> dict[str, _Entry] | None:
        """Values that the current microbatch has logged, by key; `None` outside of `training_step`."""
        return getattr(self._own, "entries", None)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context manager: inside it, collect the logged values and metric updates of a microbatch."""
        entries: dict[str, _Entry] = {}
        self._own.entries = entries
        with self._metrics.isolated():
            yield
        self._settings.update(entries)

    def log(self, fx: str, name: str, value: Any, **settings: Any) -> None:
        """Log a value as Lightning does; during a microbatch, store it instead.

        Args:
            fx: name of the hook that logs, such as `training_step`.
            name: name of the value.
            value: tensor or torchmetrics metric.
            settings: other arguments of `self.log`, as Lightning passes them.
        """
        if self._entries is None:
            super().log(fx, name, value, **settings)
            return
        if isinstance(value, Metric):
            self._metrics.check_logged(name, value)
        else:
            value = value.detach()
        count = sum(entry[:2] == (fx, name) for entry in self._entries.values())
        self._entries[f"{fx}.{name}.{count}"] = (fx, name, value, settings)

    def taken(self) -> dict[str, Any]:
        """Return the values that the last microbatch has logged, for `run.sum`, and forget them."""
        entries, self._own.entries = self._entries or {}, None
        rows = rows_of(self._run)
        taken = {"replicas": int(rows > 0), **self._metrics.taken(rows)}
        for key, (_, _, value, settings) in entries.items():
            weight = settings["batch_size"] or rows
            taken[f"count {key}"], taken[f"weight {key}"] = int(rows > 0), weight
            if not isinstance(value, Metric):
                taken[f"value {key}"] = self._column(value, weight, _reduction(settings), rows)
        return taken

    def _column(self, value: torch.Tensor, weight: int, reduction: str, rows: int) -> Any:
        number = float(value) if rows else 0.0
        if reduction in ("max", "min"):  # one place for each replica, so that sums keep each value
            column = torch.zeros(self._run.replicas, 2, dtype=torch.float64)
            replica = self._run._loop.require_microbatch("self.log").replica
            column[replica] = torch.tensor([number, 1.0], dtype=torch.float64)
            return column
        return number * weight if reduction == "mean" else number

    def apply(self, sums: dict[str, Any], device: torch.device) -> None:
        """Log the values of a global batch.

        `sums`: sums over all replicas of the results of `taken`. `device`: device of the logged tensors.
        """
        settings, self._settings = self._settings, {}
        self._metrics.apply(sums)
        for key in [name.removeprefix("count ") for name in sums if name.startswith("count ")]:
            if sums[f"count {key}"] != sums["replicas"]:
                raise StepError(
                    f"self.log({key.split('.')[1]!r}) was called for {sums[f'count {key}']} of "
                    f"{sums['replicas']} replicas; expected a call for each",
                    hint="log a value in every microbatch; decide by batch_idx, and not by the samples",
                )
            fx, name, value, own = settings[key]
            weight, reduction = sums[f"weight {key}"], _reduction(own)
            if isinstance(value, Metric):
                super().log(fx, name, value, **own)
                continue
            total = sums[f"value {key}"]
            if reduction in ("max", "min"):
                total = float(getattr(total[total[:, 1] > 0][:, 0], reduction)())
            elif reduction == "mean":
                total /= weight
            dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
            logged = torch.tensor(total, dtype=dtype, device=device)
            super().log(fx, name, logged, **{**own, "batch_size": weight})

    def outputs(self, sums: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the means over the global batch of the numbers that `training_step` returned, by name.

        `sums`: sums over all replicas of the results of `numbers_of`.
        """
        return {
            name.removeprefix("output "): torch.tensor(
                value / sums["rows"], dtype=torch.get_default_dtype(), device=device
            )
            for name, value in sums.items()
            if name.startswith("output ")
        }


def rows_of(run: Run) -> int:
    """Return the number of samples of the current microbatch."""
    return int(run.batch_rows.stop - run.batch_rows.start)


def numbers_of(output: Any, run: Run) -> dict[str, Any]:
    """Return the numbers in `output`, the result of `training_step`, for `run.sum` over the replicas.

    Each number is multiplied by the microbatch's number of samples, which is returned, too.

    Raises:
        StepError: if `output` is not a tensor of one element, or a dictionary of such tensors and numbers.
    """
    rows = rows_of(run)
    named = {"loss": output} if isinstance(output, torch.Tensor) else dict(output or {})
    numbers: dict[str, Any] = {"rows": rows}
    for name, value in named.items():
        if not isinstance(value, int | float) and not (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            raise StepError(
                f"training_step returned {name!r}, {_described(value)}; expected numbers: callbacks "
                "get the means over the global batch",
                hint="use the value in training_step, or log a number",
            )
        number = value.detach() if isinstance(value, torch.Tensor) else value
        numbers[f"output {name}"] = float(number) * rows if rows else 0.0
    return numbers


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"


def _reduction(settings: dict[str, Any]) -> str:
    own = settings["reduce_fx"]
    name = str(getattr(own, "__name__", own)).lower()
    return "mean" if name == "avg" else name
