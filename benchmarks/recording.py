"""What records and loggers cost a run whose steps take 10 ms.

Claim: less than 1 % of the time of steps, each for records with samples of the machine and for a logger.

Measured: one rank trains a small network, padded to 10 ms a step by computing. Processor time of the
threads that sample and log, as the operating system counts it, and of the main thread inside `run.log`
and inside of what measures a step. Wall times would not show 1 % on a machine with other work.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from support import Report, options_parser
from torch.utils.data import TensorDataset

import lockstep
from lockstep.state.record.pace import Pace

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


def main() -> None:
    parser = options_parser(__doc__, pairs=5)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    report = Report("Records and loggers beside steps of 10 ms", options.json)
    with tempfile.TemporaryDirectory() as place:
        places = [Path(place) / str(number) for number in range(options.pairs)]
        rounds = [train(options.steps, directory) for directory in places]
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
    report.close()


if __name__ == "__main__":
    main()
