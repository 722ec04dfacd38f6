"""What records and loggers cost a run whose steps take 10 ms, and what the step record costs any run.

Claims: less than 1 % of the time of steps, each for records with samples of the machine and for a logger.
The hashes of gradients and parameters for `lockstep replay` take less than 1 % of steps of any length, and
a loss takes less than 10 µs, or less than 0.2 % of a longer step.

Measured: one rank trains a small network, padded to 10 ms a step by computing. Processor time of the
threads that sample and log, as the operating system counts it, and of the main thread inside `run.log`
and inside of what measures a step. Of the step record: processor time of the main thread inside of its
functions beside that of the whole loop, for an MLP 64-64-10 and models of 1 and 100 MB in layers of 1 MB,
one thread; what the clock itself takes is subtracted. Wall times would not show 1 % on a machine with
other work.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import psutil
import torch
from support import Report, options_parser
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.training import step_hashes
from lockstep.engine.training.step_hashes import StepHashes, hash64
from lockstep.state.record.pace import Pace
from lockstep.state.record.recorder import Recorder
from lockstep.state.record.steps import StepRecord

STEP = 0.010
LIMIT = 0.01
LOSS = 10  # µs
LOSS_PART = 0.002  # of a step
_THREADS = {"lockstep-machine": "sampling (thread)", "lockstep-loggers": "TensorBoard (thread)"}


def compute(until: float) -> None:
    """Use a core until then, in torch, which lets other threads run as training does."""
    square = torch.ones(256, 256)
    while time.perf_counter() < until:
        square @ square


def used() -> dict[str, float]:
    """Return the processor seconds of the threads that are looked at."""
    seconds = {one.id: one.user_time + one.system_time for one in psutil.Process().threads()}
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    return {
        _THREADS[names[number]]: spent
        for number, spent in seconds.items()
        if names.get(number) in _THREADS
    }


def train(steps: int, directory: Path) -> dict[str, float]:
    """Return what each part has cost, as a part of the time of steps."""
    logging = 0.0
    with lockstep.Run(
        "recording", run_dir=directory, progress=False, threads=1, loggers=["tensorboard"]
    ) as run:
        model = run.model(torch.nn.Linear(64, 10))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        loader = run.loader(TensorDataset(torch.ones(32 * steps, 64)), batch_size=32)
        while "TensorBoard (thread)" not in used() or not any(directory.rglob("events.out*")):
            time.sleep(0.1)  # it imports TensorBoard once
        before, began = used(), time.perf_counter()
        for (inputs,) in loader:
            until = time.perf_counter() + STEP
            loss = model(inputs).mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            moment = time.thread_time()
            run.log(loss=loss)
            logging += time.thread_time() - moment
            compute(until)
        after, seconds = used(), time.perf_counter() - began
    parts = {name: (after[name] - before[name]) / seconds for name in before}
    return {**parts, "run.log (main thread)": logging / seconds, **measuring()}


def measuring(steps: int = 10_000) -> dict[str, float]:
    """Return what measuring a step takes: two waits for data, one bucket, the step itself."""
    pace = Pace()
    began = time.perf_counter()
    for _ in range(steps):
        for _ in pace.data.over(iter((0,))):
            with pace.exchange:
                pass
        pace.step(32)
    spent = time.perf_counter() - began
    return {"measuring steps (main thread)": spent / steps / STEP}


MODELS = {
    "MLP 64-64-10": (
        lambda: [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)],
        64,
        5000,
    ),
    "1 MB": (lambda: [torch.nn.Linear(512, 512)], 512, 5000),
    "100 MB": (lambda: [torch.nn.Linear(512, 512) for _ in range(100)], 512, 300),
}


class Spent:
    """Processor seconds of this thread inside of calls, by what they do, less what the clock takes."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("hashes", "losses"), 0.0)
        self._clock = 0.0
        empty = self.timed("hashes", lambda own, step, microbatch: None)
        for step in range(10_000):
            empty(self, step, None)
        self._clock = self.seconds["hashes"] / 10_000
        self.seconds["hashes"] = 0.0

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, timed. A call inside of another counts for its own part only."""

        def timing(*args: Any, **kwargs: Any) -> Any:
            before, began = sum(self.seconds.values()), time.thread_time()
            result = call(*args, **kwargs)
            spent = time.thread_time() - began - self._clock
            self.seconds[part] += spent - (sum(self.seconds.values()) - before)
            return result

        return timing


def step_record(name: str) -> tuple[float, float, float]:
    """Return, of a model: the parts of steps that hashes and losses take, and the seconds of a loss."""
    layers, width, steps = MODELS[name]
    spent = Spent()
    hashed = [(StepHashes, "update_begins"), (StepHashes, "step_ends")]
    recorded = [(StepRecord, "flush"), (Recorder, "before_backward")]

    def hash_timed(tensors: Any) -> Any:
        return spent.timed("hashes", hash64(tensors))  # read where the file is written

    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        for part, functions in (("hashes", hashed), ("losses", recorded)):
            for owner, function in functions:
                call = spent.timed(part, getattr(owner, function))
                stack.enter_context(mock.patch.object(owner, function, call))
        stack.enter_context(mock.patch.object(step_hashes, "hash64", hash_timed))
        run = stack.enter_context(
            lockstep.Run("steps", run_dir=place, progress=False, threads=1, checkpoint_every=0)
        )
        model = run.model(torch.nn.Sequential(*layers()))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        began = time.thread_time()
        for (inputs,) in run.loader(TensorDataset(torch.ones(32 * steps, width)), batch_size=32):
            run.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.thread_time() - began
    hashes, losses = spent.seconds["hashes"], spent.seconds["losses"]
    return hashes / seconds, losses / seconds, losses / steps


def spread(values: list[float], factor: float) -> str:
    """Return median, least and most, in a unit that is `factor` times smaller."""
    three = (factor * one for one in (median(values), min(values), max(values)))
    return "{:.2f} ({:.2f} to {:.2f})".format(*three)


def main() -> None:
    parser = options_parser(__doc__, pairs=5)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    report = Report("Records and loggers beside steps of 10 ms", options.json)
    with tempfile.TemporaryDirectory() as place:
        places = [Path(place) / str(number) for number in range(options.pairs)]
        rounds = [train(options.steps, directory) for directory in places]
    record = {name: [step_record(name) for _ in range(options.pairs)] for name in MODELS}
    names = sorted(rounds[0])
    rows = []
    for name in names:
        values = sorted(100 * one[name] for one in rounds)
        middle = values[len(values) // 2]
        rows.append([name, f"{middle:.3f}", f"{values[0]:.3f} to {values[-1]:.3f}"])
    loggers = [name for name in names if name.startswith("TensorBoard")]
    records = [name for name in names if name not in loggers]
    notes = []
    for what, of in (("records", records), ("TensorBoard", loggers)):
        sums = sorted(sum(one[name] for name in of) for one in rounds)
        middle = sums[len(sums) // 2]
        verdict = "holds" if middle < LIMIT else "does not hold"
        notes.append(f"{what}: {middle:.2%} of the time of steps; claim: less than 1 %: {verdict}")
    columns = ["part", "median, % of the time of steps", "min to max"]
    report.table(f"steps of 10 ms ({options.pairs} rounds)", columns, rows, notes=notes)
    rows, notes = [], []
    for name, measured in record.items():
        hashes, losses, loss = ([one[place] for one in measured] for place in range(3))
        row = [spread(hashes, 100), spread(losses, 100), spread(loss, 1e6)]
        rows.append([name, *row])
        cheap = median(loss) < LOSS * 1e-6 or median(losses) < LOSS_PART
        holds = median(hashes) < LIMIT and cheap
        notes.append(f"{name}: claims: {'hold' if holds else 'do not hold'}")
    columns = ["model", "hashes, % of the time of steps", "losses, %", "a loss, µs"]
    report.table(f"step record ({options.pairs} rounds)", columns, rows, notes=notes)
    report.close()


if __name__ == "__main__":
    main()
