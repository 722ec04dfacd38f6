"""`lockstep run --servers`: parameter servers beside the ranks, in real processes (A3)."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.template import Template

pytestmark = pytest.mark.forked

ROOT = Path(__file__).parents[2]

#: Several runs in one launch: buffers, dropout, unused parameters, two models, clipping, schedules, two
#: optimizers, weights that are loaded on the way; then again with servers that update.
JOBS = """
import os, sys
from tests.distributed import jobs
def go(suffix, names):
    for name in names:
        job = getattr(jobs, name)
        print("digest", name + suffix, job({}, {}) if name == "train_conv" else job(), flush=True)
both, summed = sys.argv[1].split(","), sys.argv[2].split(",")
go("", both + summed)
if "LOCKSTEP_SERVERS" in os.environ:
    os.environ["LOCKSTEP_STALENESS"] = "0"
    go("-updated", both)
"""
BOTH = (
    *("train_conv", "train_routed", "train_alternating", "train_gan"),
    *("train_two_optimizers", "train_with_loads"),
)
#: run.clip_grad_norm_ needs the whole gradient, which is in the servers there.
SUMMED = ("train_adamw",)
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
            if run.step == 8 and run.is_main_process and generation == 0 and doomed >= 0:
                log = (run.directory / "logs" / f"server-{doomed}.log").read_text()
                os.kill(int(log.split("process ")[1].split()[0]), signal.SIGKILL)
            if run.step == 8 and run.world.rank == 1 and generation == 0 and doomed == -2:
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


def digests(text: str) -> dict[str, str]:
    return dict(re.findall(r"^digest (\S+) (sha256:\w+)$", text, re.MULTILINE))


def finished(text: str) -> str:
    (found,) = re.findall(r"^lockstep: finished .* digest=(sha256:\w+)$", text, re.MULTILINE)
    return str(found)


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


@pytest.fixture(scope="module")
def one_process(template: Template, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the jobs end with on one rank, without servers."""
    command = Lockstep(tmp_path_factory.mktemp("one-process"), template)
    script = command.script(JOBS)
    done = command("run", "--replicas", "4", script, ",".join(BOTH), ",".join(SUMMED), env=_paths())
    assert done.code == 0, done.err
    command.close()
    return digests(done.out)


@pytest.fixture(scope="module")
def nothing_killed(template: Template, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the run that others kill comes to where nobody does."""
    command = Lockstep(tmp_path_factory.mktemp("nothing-killed"), template)
    done = command("run", command.script(KILL_A_SERVER), "-1")
    command.close()
    return finished(done.out)


@pytest.fixture(scope="module")
def small(template: Template, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the small script ends with, started by plain `python`."""
    command = Lockstep(tmp_path_factory.mktemp("small"), template)
    done = command.python(command.script(SCRIPT))
    command.close()
    return digest_of(done.out)


# --- the same bits ----------------------------------------------------------------------------------


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (3, 1)])
def test_the_bits_of_one_process(
    lockstep: Lockstep, one_process: dict[str, str], workers: int, servers: int
) -> None:
    words = ["-n", str(workers), "--servers", str(servers), "--strategy", "ps", "--replicas", "4"]
    names = (",".join(BOTH), ",".join(SUMMED))
    done = lockstep("run", *words, lockstep.script(JOBS), *names, env=_paths(), timeout=180)
    assert done.code == 0, done.err
    updated = {f"{name}-updated": one_process[name] for name in BOTH}
    assert digests(done.out) == {**one_process, **updated}
    assert "lr_scheduler" not in done.err, "torch sees that the optimizer steps"


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_verify_finds_no_difference_between_strategies(lockstep: Lockstep) -> None:
    words = ["--layouts", "2", "--strategies", "ddp,ps", "--json"]
    done = lockstep("verify", *words, lockstep.script(SCRIPT), timeout=120)
    assert done.code == 0, done.err
    verdict = json.loads(done.out)
    assert verdict["same"] is True
    assert [one["strategy"] for one in verdict["layouts"]] == ["ddp", "ps"]
    assert len({one["digest"] for one in verdict["layouts"]}) == 1


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("doomed", "name", "more"), [("1", "server 1", LATE), ("-2", "rank 1", ())]
)
def test_kill_9(
    lockstep: Lockstep, nothing_killed: str, doomed: str, name: str, more: tuple[str, ...]
) -> None:
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", *more, "--run-dir", "r"]
    done = lockstep("run", *words, lockstep.script(KILL_A_SERVER), doomed)
    assert done.code == 0, done.err
    told = (
        f"lockstep: {name} was killed by signal 9 (SIGKILL); restart 1, from the newest snapshot or "
        "checkpoint"
    )
    assert told in done.err.splitlines(), done.err
    assert finished(done.out) == nothing_killed
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
    told = (
        "lockstep: server 0 is stopped (SIGSTOP); restart 1, from the newest snapshot or checkpoint"
    )
    assert told in done.err.splitlines()


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", ["launcher", "fork server"])
def test_nobody_stays_when_their_parent_is_killed(lockstep: Lockstep, who: str) -> None:
    script = KILL_A_SERVER.replace("run.backward(", "time.sleep(0.2); run.backward(")
    words = ["-n", "1", "--servers", "2", "--strategy", "ps", "--run-dir", "r"]
    process = lockstep.start("run", *words, lockstep.script(script), "-1")
    logs = lockstep.wait_for("r/logs/server-0.log", "r/logs/server-1.log")
    pids = [int(log.split("process ")[1].split()[0]) for log in logs]
    parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process.pid if who == "launcher" else parent, signal.SIGKILL)
    process.wait(10)
    assert all(lockstep.gone(pid) for pid in pids)


@pytest.mark.ranks(3)
def test_an_interrupt_ends_servers_too(lockstep: Lockstep) -> None:
    script = KILL_A_SERVER.replace("run.backward(", "time.sleep(0.2); run.backward(")
    words = ["-n", "2", "--servers", "1", "--strategy", "ps", "--run-dir", "r"]
    process = lockstep.start("run", *words, lockstep.script(script), "-1")
    (log,) = lockstep.wait_for("r/logs/server-0.log")
    process.send_signal(signal.SIGINT)
    assert lockstep.finish(process, 20).code == 128 + signal.SIGINT
    assert lockstep.gone(int(log.split("process ")[1].split()[0]), 1)


@pytest.mark.wide
@pytest.mark.ranks(4)
def test_a_run_that_makes_room_goes_on_with_another_way_to_update(
    lockstep: Lockstep, nothing_killed: str
) -> None:
    """SIGTERM to all processes, as Slurm sends it: servers serve as long as there are workers.

    The state that is saved is the same whoever holds it.
    """
    slow = KILL_A_SERVER.replace(
        "            run.backward(",
        "            if 'SLOW' in os.environ:\n"
        "                time.sleep(0.2)\n"
        "                Path(os.environ['SLOW']).write_text('yes')\n"
        "            run.backward(",
    )
    script = lockstep.script(slow)
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", "--run-dir", "r"]
    for begun, more in (("first", ()), ("second", LATE)):
        process = lockstep.start("run", *words, *more, script, "-1", env={"SLOW": begun})
        lockstep.wait_for(begun)
        pids = [
            int(re.findall(r"process (\d+) listens", log)[-1])
            for log in lockstep.wait_for("r/logs/server-0.log", "r/logs/server-1.log")
        ]
        for pid in (*pids, process.pid):
            os.kill(pid, signal.SIGTERM)
        done = lockstep.finish(process)
        assert done.code == 75, done.err
        assert all(lockstep.gone(pid, 1) for pid in pids)
    again = lockstep("run", *words, script, "-1")
    assert "resuming after step" in again.err
    assert finished(again.out) == nothing_killed


EARLY = """
import os, re, signal, time
from pathlib import Path

def process_of(index):
    while True:
        found = re.findall(r"process (\\d+) listens", Path(f"r/logs/server-{index}.log").read_text())
        if found:
            return int(found[-1])
        time.sleep(0.01)

if os.environ["RANK"] == "0":
    for index in (0, 1):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(process_of(index), number)
    time.sleep(0.2)
"""


@pytest.mark.wide
@pytest.mark.ranks(4)
@pytest.mark.parametrize("more", [(), ("--start", "exec")])
@pytest.mark.parametrize("rest", [SCRIPT, ""], ids=["trained", "no worker comes"])
def test_signals_before_a_worker_has_come(
    lockstep: Lockstep, small: str, rest: str, more: tuple[str, ...]
) -> None:
    """Servers are ended by their launcher, and by it alone: when the script has ended."""
    words = ["-n", "2", "--servers", "2", "--strategy", "ps", "--run-dir", "r", *more]
    script = lockstep.script(EARLY + rest)
    done = lockstep("run", *words, "--preempt-signal", "USR1", script, timeout=120)
    assert done.code == 0, done.err
    assert not rest or digest_of(done.out) == small
    for index in (0, 1):
        log = (lockstep.directory / f"r/logs/server-{index}.log").read_text()
        assert re.search(rf"^lockstep: server {index}: [\d.]+ MB in", log, re.MULTILINE), log


# --- what is written --------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_bytes_are_counted(lockstep: Lockstep) -> None:
    """The script says how it is held; the flags say how many servers there are."""
    two = SCRIPT.replace("optimizer = ", "run.model(nn.Linear(3, 3)); optimizer = ")
    held = two.replace('"small", replicas=4', '"small", replicas=4, strategy="ps"')
    # One script serves all exchanges: keywords for another one do no harm.
    keywords = "matrix_approximation_rank=2, start_powerSGD_iter=10, bucket_cap_mb=1"
    held = held.replace("nn.Linear(8, 2)))", f"nn.Linear(8, 2)), {keywords})")
    assert keywords in held
    done = lockstep("run", "-n", "2", "--servers", "3", "--run-dir", "r", lockstep.script(held))
    assert digest_of(done.out) == digest_of(lockstep.python(lockstep.script(two)).out)
    told = re.findall(
        r"^lockstep: server (\d): [\d.]+ MB in, [\d.]+ MB out$", done.err, re.MULTILINE
    )
    assert told == ["0", "1", "2"]
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
    assert done.out.count("-m lockstep.engine.parameter_server") == 2


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_each_process_an_interpreter_of_its_own(lockstep: Lockstep, small: str) -> None:
    words = ["-n", "2", "--servers", "1", "--strategy", "ps", "--start", "exec"]
    done = lockstep("run", *words, lockstep.script(SCRIPT), timeout=120)
    assert done.code == 0, done.err
    assert digest_of(done.out) == small


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_a_function_is_launched_with_servers(lockstep: Lockstep, small: str) -> None:
    script = lockstep.script(SCRIPT.replace("    main()\n", "    lockstep.launch(main, n=2)\n"))
    done = lockstep.python(script, env={"LOCKSTEP_SERVERS": "1", "LOCKSTEP_STRATEGY": "ps"})
    assert done.code == 0, done.err
    assert "exchange server" in done.err
    assert digest_of(done.out) == small


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        # What flags and settings cannot be together is in tests/unit; here, that each end says so.
        (["--servers", "2", "--strategy", "ddp"], 2, "error: --servers is 2 with strategy=ddp"),
        (
            ["--strategy", "fsdp", "--staleness", "2"],
            2,
            "staleness is 2 with strategy=fsdp, which keeps no older parameters",
        ),
    ],
)
def test_what_cannot_be_together(
    lockstep: Lockstep, words: list[str], code: int, message: str
) -> None:
    done = lockstep("run", *words, lockstep.script(SCRIPT))
    assert done.code == code
    assert message in done.err
    assert "Traceback" not in done.err


@pytest.mark.ranks(1)
def test_no_number_of_servers_under_another_launcher(lockstep: Lockstep) -> None:
    done = lockstep.python(lockstep.script(SCRIPT), env={"LOCKSTEP_STRATEGY": "ps"})
    assert done.code == 1  # the interpreter's, whatever the error
    assert "strategy=ps with 0 servers; expected at least 1" in done.err
    assert "LOCKSTEP_SERVERS=1" in done.err
    assert "Traceback" not in done.err


OWN = {"LOCKSTEP_STRATEGY": "ps", "LOCKSTEP_SERVERS": "2", "LOCKSTEP_RUN_DIR": "r"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def servers_in(directory: Path) -> list[int]:
    logs = [(directory / f"r/logs/server-{index}.log").read_text() for index in (0, 1)]
    return [int(pid) for log in logs for pid in re.findall(r"process (\d+) listens", log)]


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("more", [{}, {"LOCKSTEP_STALENESS": "0"}], ids=["summed", "updated"])
@pytest.mark.parametrize("words", [(), TORCHRUN], ids=["python", "torchrun"])
def test_rank_0_starts_servers_under_other_launchers(
    lockstep: Lockstep, small: str, words: tuple[str, ...], more: dict[str, str]
) -> None:
    two = SCRIPT.replace("optimizer = ", "run.model(nn.Linear(3, 3)); optimizer = ")
    expected = digest_of(lockstep.python(lockstep.script(two)).out) if more else small
    script = lockstep.script(two if more else SCRIPT)
    done = lockstep.python(*words, script, env={**OWN, **more}, timeout=120)
    assert done.code == 0, done.err
    assert digest_of(done.out) == expected
    assert "exchange server" in done.err
    pids = servers_in(lockstep.directory)
    assert len(pids) == 2
    assert all(lockstep.gone(pid, 1) for pid in pids)


@pytest.mark.ranks(2)
def test_servers_of_rank_0_end_with_it(lockstep: Lockstep) -> None:
    die = "                if run.step == 3: os.kill(os.getpid(), 9)\n                run.backward("
    script = "import os\n" + SCRIPT.replace("                run.backward(", die)
    done = lockstep.python(lockstep.script(script), env=OWN)
    assert done.code == -9
    assert all(lockstep.gone(pid, 5) for pid in servers_in(lockstep.directory))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("start", "told"),
    [
        ("raise SystemExit(7)\n", r"server 0 ended with exit code \d before it listened"),
        (
            "import os, time\nopen('server', 'w').write(str(os.getpid()))\ntime.sleep(600)\n",
            r"server 0 did not listen within 2 s",
        ),
    ],
)
def test_a_server_of_rank_0_that_does_not_start(lockstep: Lockstep, start: str, told: str) -> None:
    broken = (
        "import os\nos.environ['LOCKSTEP_SERVERS'] = '1'\nos.environ['PYTHONPATH'] = 'broken'\n"
    )
    lockstep.script(start, "broken/sitecustomize.py")
    done = lockstep.python(
        lockstep.script(broken + SCRIPT), env={**OWN, "LOCKSTEP_JOIN_TIMEOUT": "2"}
    )
    assert done.code == 1
    assert re.search(f"error: {told}", done.err)
    assert "server-0.log" in done.err
    assert all(lockstep.gone(int(pid.read_text()), 5) for pid in lockstep.directory.glob("server"))


SPOILT = """
import sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

class Mine(torch.optim.SGD):
    pass

def tell(case, act):
    try:
        act()
    except lockstep.LockstepError as error:
        print("case", case, type(error).__name__, error.message, flush=True)

def clamp():
    model.zero_grad()
    with torch.no_grad():
        model.weight.clamp_(-0.001, 0.001)
    optimizer.step()

def scale():
    for p in model.parameters():
        p.grad.mul_(2)
    optimizer.step()

def hook():
    handle = optimizer.register_step_post_hook(lambda *_: None)
    try:
        optimizer.step()
    finally:
        handle.remove()

with lockstep.Run("spoilt", replicas=2) as run:
    tell("buffers", lambda: run.model(nn.Linear(4, 2), broadcast_buffers=False))
    model = run.model(nn.Linear(4, 2), bucket_cap_mb=1, matrix_approximation_rank=2)
    other = run.model(nn.Linear(4, 2))
    both = [*model.parameters(), *other.parameters()]
    tell("class", lambda: run.optimizer(Mine(model.parameters(), lr=0.1)))
    tell("rate", lambda: run.optimizer(torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))))
    tell("two", lambda: run.optimizer(torch.optim.SGD(both, lr=0.1)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(40, 4), torch.arange(40) % 2)
    for number, (x, y) in enumerate(run.loader(data, batch_size=8, shuffle=True)):
        run.backward(F.cross_entropy(model(x), y))
        if number == 1:
            tell("clip", lambda: run.clip_grad_norm_(model, 1.0))
        if number == 2 and sys.argv[1:]:
            cases = {"hook": hook, "state": optimizer.state.clear, "gradient": scale, "weights": clamp}
            cases[sys.argv[1]]()
        optimizer.step()
        optimizer.zero_grad()
"""


STALE = ["-n", "2", "--servers", "1", "--strategy", "ps", "--staleness", "0", "--no-exact"]


@pytest.mark.ranks(3)
def test_what_servers_cannot_do(lockstep: Lockstep) -> None:
    done = lockstep("run", *STALE, lockstep.script(SPOILT))
    told = dict(re.findall(r"^case (\w+) (\w+ .*)$", done.out, re.MULTILINE))
    expected = {
        "buffers": "ModelError broadcast_buffers=False with staleness=0",
        "class": "ModelError the optimizer's class Mine is defined in the script; expected one in a",
        "rate": "ModelError lr of the optimizer is a Tensor; expected a number",
        "two": "ModelError optimizer 3 (SGD) holds parameters of 2 models",
        "clip": "StepError run.clip_grad_norm_ needs the whole gradient of Linear",
    }
    assert list(told) == list(expected), done.err
    for case, message in expected.items():
        assert told[case].startswith(message), told[case]
    assert done.code == 0, done.err
    assert "bucket_cap_mb of run.model: without effect with staleness=0" in done.err


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("hook", "StepError: SGD has hooks around its steps"),
        ("state", "StepError: the script has changed the state of an optimizer itself"),
        ("gradient", "StepError: the script has changed a gradient of Linear"),
        ("weights", "StepError: the script has changed parameters of SGD itself"),
    ],
)
def test_what_a_script_may_not_change_where_servers_step(
    lockstep: Lockstep, case: str, message: str
) -> None:
    done = lockstep("run", *STALE, lockstep.script(SPOILT), case)
    assert done.code == 1
    assert message in done.err


@pytest.mark.ranks(2)
def test_an_optimizer_of_a_module_beside_the_script(lockstep: Lockstep, small: str) -> None:
    lockstep.script("import torch\nclass Mine(torch.optim.SGD):\n    pass\n", "below/mine.py")
    script = lockstep.script(
        "import mine\n" + SCRIPT.replace("torch.optim.SGD", "mine.Mine"), "below/train.py"
    )
    words = ["-n", "1", "--servers", "2", "--strategy", "ps", "--staleness", "0"]
    done = lockstep("run", *words, script)
    assert done.code == 0, done.err
    assert digest_of(done.out) == small
