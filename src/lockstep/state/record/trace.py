"""Trace: samples, losses and digests of every step, exact to the bit, to compare two layouts.

Every rank writes a file for each (re)start of each run, with one JSON object per line. The first line says
after which step the (re)start continues. `{"kind": "microbatch", …}` has the bits of a replica's loss and
its sample ids, `{"kind": "seen", …}` the sample ids of a microbatch without a backward pass, as in an
evaluation. `{"kind": "step", …}` has the digests of models, of objects passed to `run.register` and of
variables of `run.state` after an update, `{"kind": "end", …}` the digests at the end of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.engine.data.microbatch import LoopKey, Microbatch


class Trace:
    """Writes the trace of one rank, from one (re)start on, to a file in `directory`.

    `run` is the number of the run in its script, from 0; later runs write to subdirectories.
    """

    def __init__(self, directory: Path, rank: int, generation: int = 0, run: int = 0) -> None:
        directory = directory / f"run-{run + 1}" if run else directory
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank-{rank}.{generation}.jsonl"
        self._file = path.open("w", encoding="utf-8")

    def begin(self, step: int) -> None:
        """Write a line that this (re)start of the run continues after step number `step`.

        This invalidates the lines of earlier (re)starts for later steps, which are computed again.
        """
        self._write(kind="begin", step=step)
        self._file.flush()

    def microbatch(self, step: int, microbatch: Microbatch, loss: torch.Tensor) -> None:
        """Write the loss and the sample ids of a microbatch of step `step` that has a backward pass."""
        bits, value = loss_bits(loss), loss.item()
        numbers, samples = _numbers(microbatch), _samples(microbatch)
        self._write(
            kind="microbatch", step=step, **numbers, loss=bits, value=value, samples=samples
        )

    def seen(self, step: int, microbatch: Microbatch) -> None:
        """Write the sample ids of a microbatch without a backward pass, computed after step `step`."""
        self._write(kind="seen", step=step, **_numbers(microbatch), samples=_samples(microbatch))
        self._file.flush()  # an evaluation whose result is saved is not computed again

    def step(self, step: int, digests: Mapping[str, str]) -> None:
        """Write the digests of models, registered objects and variables, by name, after step `step`."""
        self._write(kind="step", step=step, digests=digests)
        self._file.flush()  # the trace of a killed rank has all its steps

    def end(self, digests: Mapping[str, str]) -> None:
        """Write the digests of models, registered objects and variables, by name, at the run's end."""
        self._write(kind="end", digests=digests)
        self._file.flush()

    def loader(self, number: int, length: int | None, *, exhaustive: bool) -> None:
        """Write that loader number `number` has `length` samples, `None` if unknown.

        `exhaustive`: whether one loop over the loader visits each of these samples exactly once.
        """
        self._write(kind="loader", loader=number, length=length, exhaustive=exhaustive)

    def loop(self, loop: LoopKey, *, complete: bool) -> None:
        """Write the end of `loop`; `complete` is false if the script left it by `break`."""
        self._write(kind="loop", **loop._asdict(), complete=complete)
        self._file.flush()  # a state saved now contains the result of the loop: it is not computed again

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        """Write pending lines and close the file."""
        self._file.close()


def _numbers(microbatch: Microbatch) -> dict[str, int]:
    numbers = {**microbatch.loop._asdict(), "batch": microbatch.step}
    return {**numbers, "turn": microbatch.turn, "replica": microbatch.replica}


def _samples(microbatch: Microbatch) -> list[int]:
    samples: list[int] = microbatch.indices[: microbatch.size].tolist()
    return samples


def loss_bits(loss: torch.Tensor) -> str:
    """Return the bytes of a loss, a tensor of one element, in hexadecimal digits."""
    return loss.detach().reshape(1).cpu().view(torch.uint8).numpy().tobytes().hex()
