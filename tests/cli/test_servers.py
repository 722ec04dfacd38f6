"""`lockstep run --servers`: parameter servers beside the ranks, in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of

ROOT = Path(__file__).parents[2]

#: Several runs in one launch: buffers, dropout, unused parameters, two models, clipping, a schedule.
JOBS = """
import sys
from tests.distributed import jobs
for name in sys.argv[1:]:
    job = getattr(jobs, name)
    print("digest", name, job({}, {}) if name == "train_conv" else job(), flush=True)
"""
SYNCHRONOUS = ["train_conv", "train_routed", "train_alternating", "train_gan", "train_adamw"]
#: run.clip needs the whole gradient, which is in the servers there.
UPDATED_THERE = SYNCHRONOUS[:-1]
LATE = ("--staleness", "0")

KILL_A_SERVER = """
import os, signal, sys, time
import torch
import torch.nn.functional as F
from pathlib import Path
from torch.utils.data import TensorDataset
import lockstep

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
doomed = int(sys.argv[1])
with lockstep.Run("kill", replicas=4) as run:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(48, 4), torch.arange(48) % 3)
    for epoch in run.epochs(3):
        for x, y in run.loader(data, batch_size=8, shuffle=True):
            if run.step == 8 and run.main and generation == 0 and doomed >= 0:
                log = (run.directory / "logs" / f"server-{doomed}.log").read_text()
                os.kill(int(log.split("process ")[1].split()[0]), signal.SIGKILL)
            if run.step == 8 and run.world.rank == 1 and generation == 0 and doomed == -2:
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


def digests(text: str) -> dict[str, str]:
    return dict(re.findall(r"^digest (\w+) (sha256:\w+)$", text, re.MULTILINE))


def finished(text: str) -> str:
    (found,) = re.findall(r"^lockstep: finished .* digest=(sha256:\w+)$", text, re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the jobs end with on one rank, without servers."""
    command = Lockstep(tmp_path_factory.mktemp("one-process"))
    command.script(JOBS)
    done = command("run", "--replicas", "4", "train.py", *SYNCHRONOUS, env=_paths())
    assert done.code == 0, done.err
    command.close()
    return digests(done.out)


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


# --- the same bits ----------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 3), (2, 2), (3, 1), (2, 3)])
def test_the_bits_of_one_process(
    lockstep: Lockstep, one_process: dict[str, str], workers: int, servers: int
) -> None:
    words = ["-n", str(workers), "--servers", str(servers), "--strategy", "ps", "--replicas", "4"]
    done = lockstep("run", *words, lockstep.script(JOBS), *SYNCHRONOUS, env=_paths(), timeout=120)
    assert done.code == 0, done.err
    assert digests(done.out) == one_process


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("workers", "servers"), [(1, 2), (2, 1), (3, 3)])
def test_servers_that_update_without_staleness_give_the_same_bits(
    lockstep: Lockstep, one_process: dict[str, str], workers: int, servers: int
) -> None:
    words = ["-n", str(workers), "--servers", str(servers), "--strategy", "ps", "--replicas", "4"]
    script = lockstep.script(JOBS)
    done = lockstep(
        "run", *words, "--staleness", "0", script, *UPDATED_THERE, env=_paths(), timeout=120
    )
    assert done.code == 0, done.err
    assert digests(done.out) == {name: one_process[name] for name in UPDATED_THERE}


@pytest.mark.ranks(3)
def test_more_replicas_than_servers_than_ranks(lockstep: Lockstep) -> None:
    """The script says how it is held; the flags say how many servers there are."""
    held = SCRIPT.replace('"small", replicas=4', '"small", replicas=4, strategy="ps"')
    script = lockstep.script(held)
    done = lockstep("run", "-n", "2", "--servers", "3", script)
    lockstep.script(SCRIPT)
    assert digest_of(done.out) == digest_of(lockstep.python("train.py").out)


@pytest.mark.ranks(3)
def test_verify_finds_no_difference_between_strategies(lockstep: Lockstep) -> None:
    words = ["--layouts", "1,2", "--strategies", "ddp,ps", "--json"]
    digits = str(ROOT / "examples/digits.py")
    done = lockstep("verify", *words, digits, "--", "--epochs", "1", timeout=180)
    assert done.code == 0, done.err
    verdict = json.loads(done.out)
    assert verdict["same"] is True
    assert [one["strategy"] for one in verdict["layouts"]] == ["ddp", "ddp", "ps", "ps"]
    assert len({one["digest"] for one in verdict["layouts"]}) == 1


# --- staleness --------------------------------------------------------------------------------------

APART = """
import sys, time, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

with lockstep.Run("apart", replicas=2) as run:
    torch.manual_seed(0)
    labels = torch.arange(240) % 3
    data = TensorDataset(torch.eye(3)[labels] + 0.1 * torch.randn(240, 3), labels)
    model = run.model(nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(data, batch_size=8, shuffle=True)
    for epoch in run.epochs(4):
        model.train()
        for number, (x, y) in enumerate(train):
            if number % 5 == run.world.rank:
                time.sleep(0.02)  # now the one, now the other is late
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = run.mean(model(x).argmax(1) == y for x, y in train)
        own = sum(p.double().sum().item() for p in model.parameters())
        print("rank", run.world.rank, "epoch", epoch, "sum", own, flush=True)
    run.print("accuracy", right)
"""


@pytest.mark.ranks(3)
def test_ranks_with_staleness_learn_and_agree_between_loops(lockstep: Lockstep) -> None:
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", "--staleness", "3", "--no-exact"]
    done = lockstep("run", *words, "--run-dir", "r", lockstep.script(APART))
    assert done.code == 0, done.err
    assert "lockstep: apart: approximate, by how Sequential is held" in done.err
    accuracy = float(done.out.partition("accuracy ")[2].split()[0])
    assert accuracy > 0.95
    logs = [(lockstep.directory / f"r/logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    sums = [re.findall(r"^rank \d epoch (\d) sum (\S+)$", log, re.MULTILINE) for log in logs]
    assert len(sums[0]) == 4
    assert sums[0] == sums[1], "between loops all ranks have the same parameters"


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("more", [(), ("--staleness", "0")])
@pytest.mark.parametrize(
    ("doomed", "told"),
    [
        (
            "1",
            "lockstep: server 1 was killed by signal 9 (SIGKILL); restart 1, from the newest snapshot",
        ),
        (
            "-2",
            "lockstep: rank 1 was killed by signal 9 (SIGKILL); restart 1, from the newest snapshot",
        ),
    ],
)
def test_kill_9(lockstep: Lockstep, more: tuple[str, ...], doomed: str, told: str) -> None:
    script = lockstep.script(KILL_A_SERVER)
    expected = finished(lockstep("run", script, "-1").out)
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", *more, "--run-dir", "r"]
    done = lockstep("run", *words, script, doomed)
    assert done.code == 0, done.err
    assert told in done.err.splitlines()
    assert finished(done.out) == expected
    for index in (0, 1):
        log = (lockstep.directory / f"r/logs/server-{index}.log").read_text()
        pids = [int(one) for one in re.findall(r"process (\d+) listens", log)]
        assert len(pids) == 2, "servers start again with the workers"
        assert all(lockstep.gone(pid, 1) for pid in pids)


@pytest.mark.ranks(3)
def test_a_server_that_dies_where_nothing_starts_again(lockstep: Lockstep) -> None:
    words = ["-n", "2", "--servers", "1", "--strategy", "ps", "--max-restarts", "0"]
    done = lockstep("run", *words, "--run-dir", "r", lockstep.script(KILL_A_SERVER), "0")
    assert done.code == 1
    assert re.search(
        r"^lockstep: server 0 failed on \S+: killed by signal 9 \(SIGKILL\)", done.err, re.MULTILINE
    )
    assert "log: r/logs/server-0.log" in done.err


@pytest.mark.ranks(3)
def test_a_server_that_is_stopped_is_named(lockstep: Lockstep) -> None:
    script = lockstep.script(KILL_A_SERVER.replace("signal.SIGKILL)", "signal.SIGSTOP)", 1))
    words = ["-n", "2", "--servers", "1", "--strategy", "ps", "--hang-timeout", "2"]
    done = lockstep("run", *words, "--run-dir", "r", script, "0")
    assert done.code == 0, done.err
    told = "lockstep: server 0 is stopped (SIGSTOP); restart 1, from the newest snapshot"
    assert told in done.err.splitlines()


@pytest.mark.ranks(2)
def test_nobody_stays_when_the_launcher_is_killed(lockstep: Lockstep) -> None:
    script = KILL_A_SERVER.replace("run.backward(", "time.sleep(0.2); run.backward(")
    words = ["-n", "1", "--servers", "2", "--strategy", "ps", "--run-dir", "r"]
    process = lockstep.start("run", *words, lockstep.script(script), "-1")
    logs = lockstep.wait_for("r/logs/server-0.log", "r/logs/server-1.log")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert all(lockstep.gone(int(log.split("process ")[1].split()[0])) for log in logs)


@pytest.mark.ranks(3)
def test_an_interrupt_ends_servers_too(lockstep: Lockstep) -> None:
    script = KILL_A_SERVER.replace("run.backward(", "time.sleep(0.2); run.backward(")
    words = ["-n", "2", "--servers", "1", "--strategy", "ps", "--run-dir", "r"]
    process = lockstep.start("run", *words, lockstep.script(script), "-1")
    (log,) = lockstep.wait_for("r/logs/server-0.log")
    process.send_signal(signal.SIGINT)
    assert lockstep.finish(process, 20).code == 128 + signal.SIGINT
    assert lockstep.gone(int(log.split("process ")[1].split()[0]), 1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("first", "second"), [((), LATE), (LATE, ()), (LATE, LATE)])
def test_a_run_that_makes_room_goes_on_with_another_way_to_update(
    lockstep: Lockstep, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """SIGTERM to all processes, as Slurm sends it: servers serve as long as there are workers.

    The state that is saved is the same whoever holds it.
    """
    script = lockstep.script(KILL_A_SERVER)
    expected = finished(lockstep("run", script, "-1").out)
    slow = KILL_A_SERVER.replace(
        "            run.backward(",
        "            if 'SLOW' in os.environ:\n"
        "                time.sleep(0.2)\n"
        "                Path('begun').write_text('yes')\n"
        "            run.backward(",
    )
    script = lockstep.script(slow)
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", "--run-dir", "r"]
    process = lockstep.start("run", *words, *first, script, "-1", env={"SLOW": "1"})
    lockstep.wait_for("begun")
    pids = [
        int(log.split("process ")[1].split()[0])
        for log in lockstep.wait_for("r/logs/server-0.log", "r/logs/server-1.log")
    ]
    for pid in (*pids, process.pid):
        os.kill(pid, signal.SIGTERM)
    done = lockstep.finish(process)
    assert done.code == 75, done.err
    assert all(lockstep.gone(pid, 1) for pid in pids)
    again = lockstep("run", *words, *second, script, "-1")
    assert "goes on after step" in again.err
    assert finished(again.out) == expected


# --- what is written --------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_bytes_are_counted(lockstep: Lockstep) -> None:
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", "--run-dir", "r"]
    two = SCRIPT.replace("optimizer = ", "run.model(nn.Linear(3, 3)); optimizer = ")
    done = lockstep("run", *words, lockstep.script(two))
    told = re.findall(
        r"^lockstep: server (\d): [\d.]+ MB in, [\d.]+ MB out$", done.err, re.MULTILINE
    )
    assert told == ["0", "1"]
    for rank in (0, 1):
        lines = (lockstep.directory / f"r/events/rank-{rank}.jsonl").read_text().splitlines()
        moved, idle = [one for one in map(json.loads, lines) if one["kind"] == "traffic"]
        assert 0 < idle["sent"] < 1000
        # 58 parameters, and notes of a few more elements, in each of eight steps and both ways.
        for way in ("sent", "received"):
            assert 8 * 58 * 4 < moved[way] < 8 * 58 * 4 * 3


@pytest.mark.ranks(1)
def test_the_plan_shows_servers(lockstep: Lockstep) -> None:
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", "--dry-run"]
    done = lockstep("run", *words, lockstep.script(SCRIPT))
    assert done.code == 0
    for index in (0, 1):
        assert f"server {index} on cpu" in done.out
    assert done.out.count("-m lockstep.server") == 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize("start", ["spawn", "exec"])
def test_other_ways_to_start(lockstep: Lockstep, start: str) -> None:
    script = lockstep.script(SCRIPT)
    words = ["-n", "2", "--servers", "1", "--strategy", "ps", "--start", start]
    done = lockstep("run", *words, script, timeout=120)  # four interpreters import torch
    assert done.code == 0, done.err
    assert digest_of(done.out) == digest_of(lockstep.python(script).out)


@pytest.mark.ranks(3)
def test_a_function_is_launched_with_servers(lockstep: Lockstep) -> None:
    call = SCRIPT.replace("    main()\n", "    lockstep.launch(main, n=2)\n")
    script = lockstep.script(call)
    done = lockstep.python(script, env={"LOCKSTEP_SERVERS": "1", "LOCKSTEP_STRATEGY": "ps"})
    assert done.code == 0, done.err
    assert "exchange server" in done.err
    lockstep.script(SCRIPT)
    assert digest_of(done.out) == digest_of(lockstep.python(script).out)


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["--strategy", "ps"], {}, "strategy=ps with 0 servers; expected at least 1"),
        (["--strategy", "ps", "--servers", "0"], {}, "strategy=ps with 0 servers"),
        (["--servers", "2", "--strategy", "ddp"], {}, "--servers is 2 with strategy=ddp"),
        (["--servers", "-1", "--strategy", "ps"], {}, "--servers is -1; expected at least 0"),
        (["--servers", "99", "--strategy", "ps"], {}, "--servers is 99; expected 1 to 64"),
        (["--staleness", "-1"], {}, "--staleness is -1; expected at least 0"),
        (
            ["--strategy", "ps"],
            {"LOCKSTEP_SERVERS": "two"},
            "LOCKSTEP_SERVERS is 'two'; expected an",
        ),
        (["--servers", "1"], {"LOCKSTEP_STRATEGY": "ddp"}, "--servers is 1 with strategy=ddp"),
    ],
)
def test_flags_that_cannot_work(
    lockstep: Lockstep, words: list[str], env: dict[str, str], message: str
) -> None:
    done = lockstep("run", *words, lockstep.script(SCRIPT), env=env)
    assert done.code == 2
    assert done.err.startswith(f"lockstep: error: {message}")
    assert "Traceback" not in done.err


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--servers", "1"], 2, "servers is 1 with strategy=auto, which has no servers"),
        (
            ["--staleness", "1"],
            2,
            "staleness is 1 with strategy=auto, whose workers are never behind",
        ),
        (["--exchange", "server"], 2, "exchange=server with strategy=auto, which has no servers"),
        (
            ["--servers", "1", "--strategy", "ps", "--exchange", "tree"],
            2,
            "exchange=tree with strategy=ps, whose gradients meet in the servers",
        ),
        (
            ["--servers", "1", "--strategy", "ps", "--staleness", "2"],
            1,
            "staleness=2 trains on parameters that lack updates",
        ),
        (
            ["--servers", "1", "--strategy", "ps", "--staleness", "0", "--precision", "fp16"],
            2,
            "precision=fp16 with staleness=0",
        ),
    ],
)
def test_settings_that_cannot_work(
    lockstep: Lockstep, words: list[str], code: int, message: str
) -> None:
    done = lockstep("run", *words, lockstep.script(SCRIPT))
    assert done.code == code
    assert message in done.err
    assert "Traceback" not in done.err


@pytest.mark.ranks(1)
def test_no_servers_without_their_launcher(lockstep: Lockstep) -> None:
    script = lockstep.script(SCRIPT)
    done = lockstep.python(script, env={"LOCKSTEP_STRATEGY": "ps", "LOCKSTEP_SERVERS": "1"})
    assert done.code == 1  # the interpreter's, whatever the error
    assert "strategy=ps, started by single" in done.err
    assert "hint: lockstep run -n WORKERS --servers 1 --strategy ps SCRIPT" in done.err
    assert "Traceback" not in done.err


SPOILT = """
import sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

CASE = sys.argv[1]

class Mine(torch.optim.SGD):
    pass

with lockstep.Run("spoilt", replicas=2) as run:
    model, other = run.model(nn.Linear(4, 2)), run.model(nn.Linear(4, 2))
    both = [*model.parameters(), *other.parameters()]
    if CASE == "class":
        optimizer = run.optimizer(Mine(model.parameters(), lr=0.1))
    elif CASE == "rate":
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1)))
    elif CASE == "two":
        optimizer = run.optimizer(torch.optim.SGD(both, lr=0.1))
    else:
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
    for x, y in run.loader(data, batch_size=8, shuffle=True):
        run.backward(F.cross_entropy(model(x), y))
        if CASE == "clip":
            run.clip(model, 1.0)
        if CASE == "weights":
            with torch.no_grad():
                model.weight.clamp_(-1, 1)
        if CASE == "gradient":
            for p in model.parameters():
                p.grad.mul_(2)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("class", "the optimizer's class Mine is defined in the script; expected one in a module"),
        ("rate", "lr of the optimizer is a Tensor; expected a number"),
        ("two", "holds parameters of 2 models"),
        ("clip", "run.clip needs the whole gradient of Linear"),
        ("gradient", "the script has changed a gradient of Linear"),
        ("weights", "the script has changed parameters of SGD itself"),
    ],
)
def test_what_servers_cannot_do(lockstep: Lockstep, case: str, message: str) -> None:
    words = ["-n", "2", "--servers", "1", "--strategy", "ps", "--staleness", "0"]
    done = lockstep("run", *words, lockstep.script(SPOILT), case)
    assert done.code == 1
    assert message in done.err
    assert "restart" not in done.err


@pytest.mark.ranks(2)
def test_an_optimizer_of_a_module_beside_the_script(lockstep: Lockstep) -> None:
    lockstep.script("import torch\nclass Mine(torch.optim.SGD):\n    pass\n", "mine.py")
    script = lockstep.script(
        "import mine\n" + SCRIPT.replace("torch.optim.SGD", "mine.Mine"), "below/train.py"
    )
    (lockstep.directory / "mine.py").rename(lockstep.directory / "below/mine.py")
    words = ["-n", "1", "--servers", "2", "--strategy", "ps", "--staleness", "0"]
    done = lockstep("run", *words, script)
    assert done.code == 0, done.err
    assert digest_of(done.out) == digest_of(lockstep.python(script).out)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("staleness", ["0", "3"])
def test_the_example_reaches_97_percent(lockstep: Lockstep, staleness: str) -> None:
    script = str(ROOT / "examples/parameter_server.py")
    words = ["-n", "2", "--servers", "2", script, "--staleness", staleness]
    done = lockstep("run", *words, timeout=180)
    assert done.code == 0, done.err
    accuracies = re.findall(r"^test accuracy ([\d.]+)%$", done.out, re.MULTILINE)
    assert len(accuracies) == 15
    assert float(accuracies[-1]) >= 97
