"""What records and loggers cost a run whose steps take 10 ms, and the step record where they take 100 ms.

Claim: less than 1 % of the time of steps, each for records with samples of the machine and for a logger.
The record of losses and hashes for `lockstep replay` takes less than 1 % of steps of 100 ms.

Measured: one rank trains a small network, padded to 10 ms a step by computing. Processor time of the
threads that sample and log, as the operating system counts it, and of the main thread inside `run.log`
and inside of what measures a step. Of the step record: processor time of the main thread inside of its
functions, for models of 1 and 100 MB in layers of 1 MB, one thread. Wall times would not show 1 % on a
machine with other work.
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
from lockstep.engine.training.step_hashes import StepHashes
from lockstep.state.record.pace import Pace
from lockstep.state.record.recorder import Recorder
from lockstep.state.record.steps import StepRecord

STEP = 0.010
LIMIT = 0.01
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


def step_record(layers: int, steps: int) -> float:
    """Return the part of steps of 100 ms that losses and hashes take, for a model of layers of 1 MB."""
    spent = 0.0

    def timed(owner: type, name: str) -> Any:
        call = getattr(owner, name)

        def timing(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            began = time.thread_time()
            result = call(*args, **kwargs)
            spent += time.thread_time() - began
            return result

        return mock.patch.object(owner, name, timing)

    functions = [(StepHashes, "update_begins"), (StepHashes, "step_ends"), (StepRecord, "flush")]
    functions.append((Recorder, "before_backward"))
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        for function in functions:
            stack.enter_context(timed(*function))
        run = stack.enter_context(
            lockstep.Run("steps", run_dir=place, progress=False, threads=1, checkpoint_every=0)
        )
        modules = [torch.nn.Linear(512, 512) for _ in range(layers)]
        model = run.model(torch.nn.Sequential(*modules))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        for (inputs,) in run.loader(TensorDataset(torch.ones(steps, 512)), batch_size=1):
            run.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
        return spent / steps / 0.1


def main() -> None:
    parser = options_parser(__doc__, pairs=5)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    report = Report("Records and loggers beside steps of 10 ms", options.json)
    with tempfile.TemporaryDirectory() as place:
        places = [Path(place) / str(number) for number in range(options.pairs)]
        rounds = [train(options.steps, directory) for directory in places]
    record: dict[int, list[float]] = {1: [], 100: []}
    for _ in range(options.pairs):
        for layers, parts in record.items():
            parts.append(step_record(layers, 256))
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
    rows = []
    for layers, parts in record.items():
        low, *_, high = sorted(parts)
        shares = [f"{100 * statistics.median(parts):.3f}", f"{100 * low:.3f} to {100 * high:.3f}"]
        rows.append([f"step record, model of {layers} MB", *shares])
    report.table(f"steps of 100 ms ({options.pairs} rounds of 256 steps)", columns, rows)
    report.close()


if __name__ == "__main__":
    main()
