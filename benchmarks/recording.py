"""What records and loggers cost a run whose steps take 10 ms, and what the step record costs any run.

Claims: less than 1 % of the time of steps, each for records with samples of the machine and for a logger.
The hashes of gradients and parameters for `lockstep replay` take less than 1 % of steps of any length, and
a loss takes less than 20 µs.

Measured: one rank trains a small network, padded to 10 ms a step by computing. Processor time of the
threads that sample and log, as the operating system counts it, and of the main thread inside `run.log`
and inside of what measures a step. Of the step record: processor time of the main thread inside of its
functions beside that of the whole loop, for an MLP 64-64-10 and models of 1 and 100 MB in layers of 1 MB,
one thread. Wall times would not show 1 % on a machine with other work.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from pathlib import Path
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
LOSS = 20  # µs
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
    "1 MB": (lambda: [torch.nn.Linear(512, 512)], 512, 1000),
    "100 MB": (lambda: [torch.nn.Linear(512, 512) for _ in range(100)], 512, 300),
}


def step_record(name: str) -> tuple[float, float]:
    """Return the part of steps that hashes take, and the microseconds of a loss, for a model."""
    layers, width, steps = MODELS[name]
    spent = dict.fromkeys(("hashes", "losses"), 0.0)

    def timed(part: str, owner: type, name: str) -> Any:
        call = getattr(owner, name)

        def timing(*args: Any, **kwargs: Any) -> Any:
            began, before = time.thread_time(), sum(spent.values())
            result = call(*args, **kwargs)
            # A hash is read where the file is written, inside of the recording of a loss.
            spent[part] += time.thread_time() - began - (sum(spent.values()) - before)
            return result

        return mock.patch.object(owner, name, timing)

    def hash_timed(tensors: Any) -> Any:
        value = hash64(tensors)

        def timing() -> bytes:
            began = time.thread_time()
            result = value()
            spent["hashes"] += time.thread_time() - began
            return result

        return timing

    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        for function in (StepHashes, "update_begins"), (StepHashes, "step_ends"):
            stack.enter_context(timed("hashes", *function))
        for function in (StepRecord, "flush"), (Recorder, "before_backward"):
            stack.enter_context(timed("losses", *function))
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
    return spent["hashes"] / seconds, spent["losses"] / steps * 1e6


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
    for name, both in record.items():
        parts, losses = [100 * part for part, _ in both], [loss for _, loss in both]
        row = [
            f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})"
            for one in (parts, losses)
        ]
        rows.append([name, *row])
        holds = statistics.median(parts) < 100 * LIMIT and statistics.median(losses) < LOSS
        notes.append(f"{name}: claims: {'hold' if holds else 'do not hold'}")
    columns = ["model", "hashes, % of the time of steps", "a loss, µs"]
    report.table(f"step record ({options.pairs} rounds)", columns, rows, notes=notes)
    report.close()


if __name__ == "__main__":
    main()
