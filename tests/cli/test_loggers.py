"""TensorBoard, Weights & Biases, MLflow: the mean over all replicas, through kills."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.state.record.loggers import TensorBoard

pytestmark = pytest.mark.forked

SCRIPT = """
import sys
import time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import lockstep

class Lines:
    def log(self, values, step):
        if step == 7 and "broken" in sys.argv:
            raise RuntimeError("the disk of the logger is full")
        with open("lines", "a") as file:
            file.write(f"{step} {sorted(values)}\\n")

generator = torch.Generator().manual_seed(0)
labels = torch.randint(0, 3, (44,), generator=generator)
data = TensorDataset(torch.randn(44, 4, generator=generator), labels)
with lockstep.Run("logged", replicas=2, progress="broken" in sys.argv, loggers=[Lines()]) as run:
    model = run.model(torch.nn.Linear(4, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(data, batch_size=8, shuffle=True)
    for epoch in run.epochs(5):
        while epoch == 3 and "waits" in sys.argv and not Path("go").exists():
            time.sleep(0.05)
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        run.log(accuracy=run.mean(model(x).argmax(1) == y for x, y in train))
"""
STEPS = 30


@pytest.fixture
def script(lockstep):
    return lockstep.script(SCRIPT)


def means(run: Path) -> dict[int, float]:
    """Return the loss of each step as the ranks have recorded it."""
    found: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for path in run.glob("events/rank-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["kind"] == "log" and "loss" in line:
                found[line["step"]][line["replica"]] = line["loss"], line["weight"]
    return {
        step: sum(loss * weight for loss, weight in of_step.values())
        for step, of_step in found.items()
    }


def tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = module.EventAccumulator(str(run / "loggers/tensorboard"), size_guidance={"scalars": 0})
    files.Reload()
    tags = files.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in files.Scalars(tag)] for tag in tags}


def mlflow(run: Path) -> dict[str, list[tuple[int, float]]]:
    module = pytest.importorskip("mlflow")
    client = module.MlflowClient(tracking_uri=f"sqlite:///{run}/loggers/mlflow.db")
    number = (run / "loggers/mlflow-run").read_text()
    assert client.get_run(number).info.status == "FINISHED"
    assert client.get_run(number).data.params["name"] == "logged"
    histories = {name: client.get_metric_history(number, name) for name in ("loss", "accuracy")}
    return {name: [(one.step, one.value) for one in of] for name, of in histories.items()}


def records(content: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file of W&B's: LevelDB's log format behind a header of 7 bytes."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:  # no part begins in what is left of a block
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        place += 7 + size
        if not kind or place > len(content):
            return
        whole += content[place - size : place]
        if kind in (1, 4):  # a whole record, or the last of its parts
            yield whole
            whole = b""


def wandb(run: Path) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for path in sorted(run.glob("loggers/wandb/offline-run-*/*.wandb")):
        for name, values in wandb_file(path).items():
            found[name] += values
    return dict(found)


def wandb_file(path: Path) -> dict[str, list[tuple[int, float]]]:
    module = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = defaultdict(list)
    for content in records(path.read_bytes()):
        record = module.Record()
        record.ParseFromString(content)
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            if not name.startswith("_"):
                found[name].append((int(record.history.step.num), float(item.value_json)))
    return dict(found)


# MLflow's store uses what SQLAlchemy 2.1 will drop.
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_a_kill_repeats_no_step_that_was_noted_and_wandb_says_once_that_it_has_no_key(
    lockstep, script, monkeypatch
):
    flags = [word for name in ("tensorboard", "wandb", "mlflow") for word in ("--logger", name)]
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    environ = {"HOME": ".", "NETRC": str(lockstep.directory / "none")}
    words = ["run", "-n", "2", "--run-dir", "run", *flags, script, "waits"]
    launch = lockstep.start(*words, env=environ)
    progress = lockstep.directory / "run/loggers/progress.json"
    number, rank, _ = lockstep.wait_for(
        "run/loggers/wandb-run", "run/events/rank-0.jsonl", "run/loggers/progress.json", seconds=120
    )
    deadline = time.monotonic() + 60
    # W&B keeps the last of 18 steps until the next comes, and writes the others within a second.
    while json.loads(progress.read_text())["step"] < 18 or not wandb(progress.parents[1]):
        assert time.monotonic() < deadline, progress.read_text()
        time.sleep(0.1)
    os.kill(json.loads(rank.splitlines()[0])["pid"], signal.SIGKILL)
    (lockstep.directory / "go").touch()
    done = lockstep.finish(launch, timeout=120)
    assert done.code == 0, done.err
    assert "rank 0 was killed by signal 9" in done.err
    assert done.err.count("wandb has no key: it logs offline") == 1, done.err
    assert "warning" not in done.err, done.err
    run = lockstep.directory / "run"
    expected = means(run)
    assert sorted(expected) == list(range(1, STEPS + 1)), "events outlive kills"
    for logged in (tensorboard(run), mlflow(run)):
        assert [step for step, _ in logged["loss"]] == sorted(expected)
        assert dict(logged["loss"]) == pytest.approx(expected, rel=1e-5)
        assert [step for step, _ in logged["accuracy"]] == [6, 12, 18, 24, 30]
    files = sorted(run.glob("loggers/wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{number}.wandb"] * 2, "both are one run of W&B's"
    before, after = ([step for step, _ in wandb_file(file)["loss"]] for file in files)
    assert (before, after) == (list(range(1, before[-1] + 1)), list(range(19, STEPS + 1)))
    losses = dict(wandb(run)["loss"])
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)


def test_tensorboard_drops_what_was_written_before_a_kill_and_not_noted(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first, steps in ((0, range(4)), (0, range(6)), (5, range(5, 8))):
        writer = TensorBoard(tmp_path / "loggers/tensorboard", first)
        for step in steps:
            writer.log({"loss": float(step)}, step)
        writer.flush()
    assert tensorboard(tmp_path)["loss"] == [(step, float(step)) for step in range(8)]


def test_a_logger_of_the_scripts_own_that_raises_ends_nothing(lockstep, script):
    done = lockstep("run", "-n", "2", "--run-dir", "run", script, "broken")
    assert done.code == 0, done.err
    assert done.err.count("logger Lines has failed") == 1, done.err
    assert "RuntimeError: the disk of the logger is full" in done.err
    steps = [
        int(line.split()[0]) for line in (lockstep.directory / "lines").read_text().splitlines()
    ]
    assert max(steps) == 6


def test_a_logger_of_the_scripts_own_gets_each_step_once(lockstep, script):
    """The kill comes when the last step is noted: before, it might repeat the values of a second."""
    launch = lockstep.start("run", "-n", "2", "--run-dir", "run", script, "waits")
    progress = lockstep.directory / "run/loggers/progress.json"
    _, rank = lockstep.wait_for("run/loggers/progress.json", "run/events/rank-0.jsonl", seconds=120)
    deadline = time.monotonic() + 60
    while json.loads(progress.read_text())["step"] < 18:
        assert time.monotonic() < deadline, progress.read_text()
        time.sleep(0.1)
    os.kill(json.loads(rank.splitlines()[0])["pid"], signal.SIGKILL)
    (lockstep.directory / "go").touch()
    done = lockstep.finish(launch, timeout=120)
    assert done.code == 0, done.err
    assert "rank 0 was killed by signal 9" in done.err
    lines = (lockstep.directory / "lines").read_text().splitlines()
    losses = [int(line.split()[0]) for line in lines if "loss" in line]
    assert losses == list(range(1, STEPS + 1))
    accuracies = [int(line.split()[0]) for line in lines if "accuracy" in line]
    assert accuracies == [6, 12, 18, 24, 30]


def test_a_logger_without_a_name_that_is_known_is_refused(lockstep, script):
    done = lockstep("run", "-n", "2", "--logger", "nothing", script)
    assert done.code == 2, done.err
    assert "a logger is 'nothing'; expected one of tensorboard, wandb, mlflow" in done.err
    assert "Traceback" not in done.err


STUCK = """
import atexit, os, signal, sys, time, torch, lockstep
from lockstep.state.record import forwarding, loggers

def stuck(*_, **__):
    time.sleep(3600)

class Backend(loggers.Backend):  # as W&B's, whose server does not answer
    def __init__(self, *_):
        atexit.register(stuck)
    def log(self, values, step):
        pass
    close = stuck

make = forwarding.make
forwarding.make = lambda logger, *more: Backend() if logger == "wandb" else make(logger, *more)
forwarding._QUIET_SECONDS, forwarding._HURRY_SECONDS, forwarding._END_SECONDS = 1.0, 2.0, 3.0
with lockstep.Run("stuck", replicas=1, loggers=["wandb", "tensorboard"]) as run:
    model = run.model(torch.nn.Linear(4, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=2)
    for _ in run.epochs(2):
        for (x,) in train:
            loss = model(x).square().mean()
            run.backward(loss)
            optimizer.step()
            run.log(loss=loss)
            if run.step == 3 and sys.argv[1:] == ["preempted"]:
                os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.ranks(1)
def test_a_logger_that_never_closes_does_not_keep_a_run_that_is_done(lockstep):
    """The record says so first, other loggers are closed, and the process ends."""
    script = lockstep.script(STUCK)
    done = lockstep("run", "--run-dir", "r", "--hang-timeout", "2", script, timeout=60)
    assert (done.code, done.out.count("lockstep: finished steps=8 ")) == (0, 1)
    assert "restart" not in done.err
    waits = "lockstep: waiting for loggers to close: wandb\n"
    left = "lockstep: warning: loggers have not closed within 3 s: wandb; they may lack"
    assert done.err.index(waits) < done.err.index(left)
    assert json.loads((lockstep.directory / "r/run.json").read_text())["status"] == "finished"
    assert [step for step, _ in tensorboard(lockstep.directory / "r")["loss"]] == list(range(1, 9))
    assert json.loads((lockstep.directory / "r/loggers/progress.json").read_text())["step"] == 8


@pytest.mark.ranks(1)
def test_a_logger_that_never_closes_takes_a_few_seconds_of_a_preemptions_notice(lockstep):
    script = lockstep.script(STUCK)
    done = lockstep("run", "--run-dir", "r", script, "preempted", timeout=60)
    assert (done.code, "restart" in done.err) == (75, False)
    assert "loggers have not closed within 2 s: wandb" in done.err
    assert json.loads((lockstep.directory / "r/run.json").read_text())["status"] == "preempted"
