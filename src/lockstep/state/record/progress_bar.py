"""Show the progress of training: a bar if standard error is a terminal, else a line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

_REFRESH_SECONDS = 0.1


class ProgressBar:
    """Progress bar with samples per second and the newest logged values; silent unless `shown`."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._is_terminal = sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        self._values: dict[str, Any] = {}
        self._refreshed = 0.0
        self._started = 0.0
        self._samples = 0

    def epoch_begins(self, epoch: int, epochs: int, steps: int | None) -> None:
        """Reset the count of samples for a new epoch; on a terminal, show a new bar.

        `epoch` counts from 0; `epochs` is their number, 0 if unknown. `steps` is the number of global
        batches in the loop, `None` if unknown.
        """
        self._started = time.monotonic()
        self._samples = 0
        if self._shown and self._is_terminal:
            self._bar = tqdm(
                total=steps,
                desc=_title(epoch, epochs),
                unit="step",
                leave=False,
                dynamic_ncols=True,
            )

    def step(self, samples: int) -> None:
        """Add `samples` to the epoch's count of samples, and advance the bar by one step."""
        self._samples += samples
        bar, now = self._bar, time.monotonic()
        if bar is None:
            return
        bar.n += 1
        if now - self._refreshed >= _REFRESH_SECONDS:
            self._refreshed = now
            bar.set_postfix_str(self._summary(), refresh=False)
            bar.refresh()

    def log(self, values: Mapping[str, Any]) -> None:
        """Update the logged values, by name, that the bar shows.

        A tensor is copied from its device only when the bar is drawn.
        """
        if self._shown:
            self._values.update(values)

    def epoch_ends(self, epoch: int, epochs: int) -> None:
        """Close the bar; print a line with epoch, newest logged values and samples per second.

        `epoch` counts from 0; `epochs` is their number, 0 if unknown.
        """
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._shown and self._samples:
            self.say(f"{_title(epoch, epochs)}  {self._summary()}")

    def _summary(self) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        parts = [f"{name} {_short(value)}" for name, value in self._values.items()]
        return "  ".join([*parts, f"{self._samples / elapsed:,.0f} samples/s"])

    @staticmethod
    def say(text: str) -> None:
        """Print a line to standard error, above the bar if there is one."""
        tqdm.write(f"{text}\n", file=sys.stderr, end="")  # in one piece, other ranks write here too

    @staticmethod
    def print(text: str) -> None:
        """Print a line to standard output, above the bar if there is one."""
        tqdm.write(f"{text}\n", file=sys.stdout, end="")
        sys.stdout.flush()


def _title(epoch: int, epochs: int) -> str:
    """Return `epoch 1/10` for `epoch=0` and `epochs=10`; `epoch 1` if `epochs` is 0 (unknown)."""
    return f"epoch {epoch + 1}/{epochs}" if epochs else f"epoch {epoch + 1}"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else f"of shape {tuple(value.shape)}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
