"""Bad input and bad luck: one clear verdict, the right exit code, no hang, no process left."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Lockstep

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]

SCRIPT = """
import os, signal, sys
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

FAULT = os.environ.get("FAULT", "")
RANK = int(os.environ.get("RANK", 0))

def fault(moment):
    if FAULT == moment and RANK == 1:
        raise ValueError(f"broken {moment}")

fault("before the group")
with lockstep.Run("faulty", replicas=int(os.environ.get("R", 2))) as run:
    net = nn.Linear(4, 3 if FAULT == "shapes" and RANK == 1 else 2)
    model = run.model(net) if FAULT != "no model" else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if FAULT != "no model":
        optimizer = run.optimizer(optimizer)
    data = TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.int64))
    train = run.loader(data, batch_size=8)
    if FAULT == "outside":
        run.backward(model(torch.randn(2, 4)).mean())
    for epoch in run.epochs(3):
        for x, y in train:
            if epoch == 1 and run.step == 6:
                fault("in a step")
                if FAULT == "kill" and RANK == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if FAULT == "break" and RANK == 1:
                    break
                if FAULT == "leave" and RANK == 1:
                    sys.exit(0)
                if FAULT == "skip" and RANK == 1:
                    FAULT = ""
                    continue
            loss = F.cross_entropy(model(x), y)
            if FAULT == "nan" and run.step == 5:
                loss = loss * float("nan")
            run.backward(loss if FAULT != "vector" else loss.repeat(2))
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        if epoch == 2:
            fault("in the last epoch")
        with torch.no_grad():
            run.mean(F.cross_entropy(model(x), y) for x, y in train)
            fault("in evaluation")
"""


@pytest.fixture
def faulty(lockstep: Lockstep) -> Lockstep:
    lockstep.script(SCRIPT)
    return lockstep


def run(command: Lockstep, fault: str, *options: str, n: int = 2, **env: str) -> tuple[int, str]:
    done = command(
        "run", "-n", str(n), *options, "train.py", env={"FAULT": fault, **env}, timeout=60
    )
    assert "Traceback" not in _verdict(done.err)
    return done.code, _verdict(done.err)


def _verdict(text: str) -> str:
    """The launcher's last word; before it the main rank may have said something of its own."""
    start = text.rfind("lockstep: ")
    return text[start:] if start >= 0 else text


def test_nothing_goes_wrong_without_a_fault(faulty: Lockstep) -> None:
    code, _ = run(faulty, "")
    assert code == 0


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    "moment", ["before the group", "in a step", "in evaluation", "in the last epoch"]
)
def test_an_exception_in_one_rank(faulty: Lockstep, moment: str) -> None:
    code, verdict = run(faulty, moment)
    assert code == 1
    assert f"rank 1 of 2 failed on {socket.gethostname()}: ValueError: broken {moment}" in verdict
    assert "train.py:13" in verdict


def test_a_killed_rank(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "kill")
    assert code == 1
    assert "rank 1 of 2 failed" in verdict
    assert "killed by signal 9 (SIGKILL)" in verdict


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("exchange", ["shared-memory", "tree"])
def test_a_rank_that_breaks_out_of_the_loop_is_named(faulty: Lockstep, exchange: str) -> None:
    code, verdict = run(faulty, "break", LOCKSTEP_EXCHANGE=exchange)
    assert code == 1
    assert (
        "EarlyExitError: rank 1 left this loop in batch 2, rank 0 waits for it in batch 2"
        in verdict
    )
    assert "hint: a `break` or `continue` must not depend on the rank" in verdict


def test_a_rank_that_ends_the_script_early_is_named(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "leave")
    assert code == 1
    assert "rank 1" in verdict


def test_a_batch_that_one_rank_skips_is_named(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "skip")
    assert code == 1
    assert "computes gradients of another batch than rank" in verdict
    assert "hint: every rank must call run.backward for every microbatch" in verdict


def test_a_model_that_the_run_does_not_hold(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "no model")
    assert code == 1
    assert "ModelError: the loss comes from no model of the run" in verdict


def test_ranks_with_different_models(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "shapes")
    assert code == 1
    assert "rank 1 of 2 built a different Linear than rank 0: weight: (3, 4)" in verdict
    assert "rank 0 has weight: (2, 4)" in verdict


def test_backward_outside_of_a_loader(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "outside")
    assert code == 1
    assert "StepError: run.backward was called outside of a loop over a loader" in verdict


def test_a_loss_that_is_no_scalar(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "vector")
    assert code == 1
    assert "ModelError: the loss is (2,); expected a scalar" in verdict


def test_a_loss_that_is_not_finite(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "nan", "--stop-on-nan")
    assert code == 1
    assert "NonFiniteLossError: the loss is nan in epoch 1, batch 1" in verdict


def test_more_ranks_than_replicas(faulty: Lockstep) -> None:
    code, verdict = run(faulty, "", n=3)
    assert code == 2
    assert "3 ranks for 2 replicas" in verdict
    assert "hint: start at most 2 ranks" in verdict


def test_a_run_that_ends_without_a_save_names_none(lockstep: Lockstep) -> None:
    lockstep.script(
        "import lockstep\nwith lockstep.Run('x') as run:\n    run.barrier() if run.world.rank else 0"
    )
    done = lockstep("run", "-n", "2", "train.py")
    assert (done.code, "run.save" in done.err) == (1, False)
    assert "rank 1 is in run.barrier at train.py:3" in done.err
    assert "rank 0 is in the end of the run at train.py:2" in done.err


def test_a_mistake_under_plain_python_is_one_message(faulty: Lockstep) -> None:
    done = faulty.python("train.py", env={"FAULT": "vector"})
    assert done.code == 1
    assert "lockstep: error: the loss is (2,)" in done.err
    assert "Traceback" not in done.err


def test_a_taken_port(faulty: Lockstep) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = faulty.python("train.py", env=env)
    assert done.code == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.err
    assert "hint: start with `lockstep run`" in done.err


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "tiny"
    place.mkdir()
    options = ["-o", "size=256k", "tmpfs", str(place)]
    done = subprocess.run(["/bin/mount", "-t", "tmpfs", *options], check=False, capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"this machine lets nobody mount: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["/bin/umount", str(place)], check=True)


def test_a_disk_that_is_full(faulty: Lockstep, tiny_disk: Path) -> None:
    faulty.script(SCRIPT.replace("run.log(loss=loss)", "run.log(loss=loss, text='x' * 9000)"))
    code, verdict = run(faulty, "", "--run-dir", str(tiny_disk))
    assert code == 1
    assert "RunDirectoryError: the run directory" in verdict
    assert "No space left on device" in verdict
    assert "--run-dir" in verdict


SAVES = """
import os, pathlib, torch, lockstep

filler = pathlib.Path(os.environ["LOCKSTEP_RUN_DIR"], "filler")
fills = os.environ["FAULT"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not fills:
    filler.unlink(missing_ok=True)
with lockstep.Run("full", replicas=2) as run:
    model = run.model(torch.nn.Linear(100, 10))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(torch.utils.data.TensorDataset(torch.ones(32, 100)), batch_size=8)
    for epoch in run.epochs(4):
        for (x,) in train:
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 1 and fills and run.is_main_process:
            with open(filler, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(512)):
                        pass
                except OSError:
                    pass
        run.save()
"""


def test_a_disk_that_is_full_for_a_while(lockstep: Lockstep, tiny_disk: Path) -> None:
    """An error of Lockstep's own with it as its cause: the next generation finds room."""
    lockstep.script(SAVES)
    calm = lockstep("run", "-n", "2", "train.py", env={"FAULT": ""}, timeout=60)
    command = ("run", "-n", "2", "--run-dir", str(tiny_disk / "run"), "train.py")
    done = lockstep(*command, env={"FAULT": "full"}, timeout=60)
    assert done.code == 0, done.err
    restarts = [line for line in done.err.splitlines() if "; restart " in line]
    assert len(restarts) == 1
    assert "Error: the " in restarts[0]
    # By either rank: rank 1 learns it from the store, with the rank that it happened in.
    assert re.search(r"cannot be written: (rank [01]: )?No space left on device", restarts[0])
    assert done.out.rpartition("digest=")[2] == calm.out.rpartition("digest=")[2] != ""


def test_a_finished_run_is_not_overwritten(faulty: Lockstep) -> None:
    assert run(faulty, "", "--run-dir", "kept")[0] == 0
    code, verdict = run(faulty, "", "--run-dir", "kept")
    assert code == 0, "there is nothing to do"
    assert "lockstep: finished already steps=" in verdict
    code, verdict = run(faulty, "", "--run-dir", "kept", "--replicas", "7")
    assert code == 1
    assert "is finished; expected a new or an unfinished one" in verdict
    assert run(faulty, "", "--run-dir", "kept", "--fresh")[0] == 0


def test_another_run_in_the_directory_is_refused(faulty: Lockstep) -> None:
    assert run(faulty, "in a step", "--run-dir", "kept")[0] == 1
    code, verdict = run(faulty, "", "--run-dir", "kept", R="4")
    assert code == 1
    assert "replicas: 2 recorded, 4 now" in verdict
    assert run(faulty, "", "--run-dir", "kept")[0] == 0


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("replicas", ["2", "4"])
def test_an_exception_between_forward_and_backward(lockstep: Lockstep, replicas: str) -> None:
    """Buffers have changed on one rank, and the others wait for its gradients, not for its buffers."""
    script = SCRIPT.replace(
        "nn.Linear(4, 3 if", "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3 if"
    )
    script = script.replace("RANK == 1 else 2)", "RANK == 1 else 2))")
    before_backward = '            if FAULT == "nan"'
    moment = '            fault("after forward")\n'
    script = script.replace(before_backward, moment + before_backward)
    lockstep.script(script)
    code, verdict = run(lockstep, "after forward", R=replicas)
    assert code == 1
    assert "ValueError: broken after forward" in verdict


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group that may use 1.5 GB; whoever joins it and takes more is killed by the kernel."""
    if os.geteuid() != 0:
        pytest.skip("making a control group needs root")
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = [path for _, controllers, path in lines if controllers == "memory"]
    group = Path(
        f"/sys/fs/cgroup/memory{own[0]}/lockstep-test-{os.getpid()}" if own else "/nowhere"
    )
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1500 << 20))
    except OSError as error:
        pytest.skip(f"this machine gives no control group for memory: {error}")
    yield group
    for _ in range(50):  # the last process may still be on its way out
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


@pytest.mark.wide
def test_a_rank_that_is_out_of_memory(lockstep: Lockstep, little_memory: Path) -> None:
    greedy = "taken = [bytearray(50 << 20) for _ in range(100)]"
    lockstep.script(SCRIPT.replace("os.kill(os.getpid(), signal.SIGKILL)", greedy))
    join = f"echo $$ > {little_memory}/cgroup.procs; exec {sys.executable} -m lockstep run -n 2 train.py"
    shell = f"import os; os.execv('/bin/sh', ['sh', '-c', {join!r}])"
    done = lockstep.python("-c", shell, env={"FAULT": "kill"})
    verdict = _verdict(done.err)
    assert done.code == 1
    assert "rank 1 of 2 failed" in verdict
    assert "killed by signal 9 (SIGKILL): out of memory, says the kernel" in verdict
