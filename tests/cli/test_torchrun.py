"""`lockstep run` in the place of `torchrun`: command lines of others, and each flag on real ranks."""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Done, Lockstep

pytestmark = pytest.mark.forked

#: What the scripts of these lines do as far as a launcher can tell: take arguments, meet, add, part.
SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
if dist.get_rank() == 0:
    print("ranks", int(total.item()), "arguments", *sys.argv[1:])
dist.destroy_process_group()
"""

DOCS = "docs.pytorch.org/docs/stable/elastic/run.html"
TUTORIAL = "docs.pytorch.org/tutorials"
#: Where a line comes from; the line; how many machines type it, and how many ranks there are.
#: Only what its text leaves open is filled in: a number of ranks, a host, a job.
LINES = [
    (DOCS, "torchrun --standalone --nnodes=1 --nproc-per-node=2 train.py --arg1 x", 1, 2),
    (
        DOCS,
        "torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=2 train.py",
        1,
        2,
    ),
    (
        DOCS,
        (
            "torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-id=job --rdzv-backend=c10d "
            "--rdzv-endpoint=localhost:29400 train.py"
        ),
        2,
        2,
    ),
    (
        DOCS,
        (
            "torchrun --nnodes=1:4 --nproc-per-node=2 --max-restarts=3 --rdzv-id=job --rdzv-backend=c10d "
            "--rdzv-endpoint=localhost train.py"
        ),
        1,
        2,
    ),
    (
        f"{TUTORIAL}/beginner/ddp_series_fault_tolerance.html",
        "torchrun --standalone --nproc_per_node=gpu multigpu_torchrun.py 50 10",
        1,
        0,
    ),
    (
        f"{TUTORIAL}/intermediate/ddp_tutorial.html",
        (
            "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_id=100 --rdzv_backend=c10d "
            "--rdzv_endpoint=localhost:29400 elastic_ddp.py"
        ),
        2,
        16,
    ),
    ("pytorch/examples distributed/ddp", "torchrun --nnodes=1 --nproc_per_node=8 example.py", 1, 8),
    (
        "pytorch/examples distributed/ddp-tutorial-series",
        (
            "torchrun --nnodes 2 --nproc_per_node 1 --rdzv_id 2024 --rdzv_backend c10d "
            "--rdzv_endpoint 127.0.0.1:29500 multinode_torchrun.py 50 10"
        ),
        2,
        2,
    ),
    (
        "pytorch/examples distributed/tensor_parallelism",
        (
            'torchrun --nnodes=1 --nproc_per_node=4 --rdzv_id=101 --rdzv_endpoint="localhost:5972" '
            "fsdp_tp_example.py"
        ),
        1,
        4,
    ),
    (
        "karpathy/nanoGPT",
        "torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py",
        1,
        8,
    ),
    (
        "karpathy/nanoGPT",
        (
            "torchrun --nproc_per_node=1 --nnodes=2 --node_rank={node} --master_addr=127.0.0.1 "
            "--master_port=1234 train.py"
        ),
        2,
        2,
    ),
    ("karpathy/nanochat", "torchrun --nproc_per_node=2 -m scripts.base_train --depth=26", 1, 2),
    (
        "huggingface/accelerate",
        "torchrun --nproc_per_node 2 ./nlp_example.py --mixed_precision fp16",
        1,
        2,
    ),
    (
        "huggingface/accelerate",
        (
            "torchrun --nproc_per_node 2 --nnodes 2 --rdzv_id 2299 --rdzv_backend c10d "
            "--rdzv_endpoint localhost:29500 ./cv_example.py --data_dir path_to_data"
        ),
        2,
        4,
    ),
]


def launched(lockstep: Lockstep, line: str, machines: int) -> list[Done]:
    """Type a line on each of several machines, with one word changed."""
    program, *words = shlex.split(line)
    assert program == "torchrun"
    words = ["run", *words]
    # A launch that more nodes may join waits half a minute for them, under both launchers.
    env = {"PET_RDZV_CONF": "last_call_timeout=1"}
    started = [
        lockstep.start(*(word.format(node=node) for word in words), env=env)
        for node in range(machines)
    ]
    return [lockstep.finish(process) for process in started]


@pytest.mark.wide(beyond=5)
@pytest.mark.parametrize(
    ("source", "line", "machines", "ranks"), LINES, ids=lambda value: str(value)[:40]
)
@pytest.mark.ranks(8)
def test_lines_of_others_run_with_one_word_changed(
    lockstep: Lockstep, source: str, line: str, machines: int, ranks: int
) -> None:
    target = next(word for word in line.split() if word.endswith((".py", "base_train")))
    lockstep.script(
        SCRIPT, target.replace("base_train", "base_train.py").replace("scripts.", "scripts/")
    )
    done = launched(lockstep, line, machines)
    if ranks == 0:  # one for each GPU; here there may be none
        assert done[0].code == 0 or "torch sees none on this machine" in done[0].err
        return
    arguments = line.partition(f"{target}")[2].split()
    assert [one.code for one in done] == [0] * machines, [one.err for one in done]
    said = "".join(one.out for one in done).split()
    assert said == ["ranks", str(ranks), "arguments", *arguments]
    assert not (lockstep.directory / "runs").exists()


@pytest.mark.parametrize("line", [line for _, line, _, _ in LINES])
def test_torchrun_itself_takes_these_lines(line: str) -> None:
    from torch.distributed.run import parse_args

    words = shlex.split(line.format(node=0))[1:]
    options = vars(parse_args(words))
    assert [options["training_script"], *options["training_script_args"]] == words[
        words.index(options["training_script"]) :
    ]


def test_the_manual_has_these_lines() -> None:
    text = (Path(__file__).parents[2] / "docs/manual/torchrun.md").read_text()
    flags = {word.partition("=")[0] for _, line, _, _ in LINES for word in line.split()}
    for flag in (word.replace("_", "-") for word in flags if word.startswith("--r")):
        assert flag in text, flag
    for source, _, _, _ in LINES:
        assert "/".join(source.split()[0].split("/")[:2]) in text, source


# What plain scripts leave.

PRINTS = "import os; print('I am', os.environ['RANK'])"
HIDDEN = "lockstep: ranks other than 0 have printed, too: -t 0 shows it, --log-dir DIR keeps it\n"


@pytest.mark.ranks(2)
def test_a_plain_script_leaves_nothing(
    lockstep: Lockstep, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    done = lockstep("run", "-n", "2", lockstep.script(PRINTS), env={"TMPDIR": str(temporary)})
    assert (done.code, done.out, done.err) == (0, "I am 0\n", HIDDEN)
    assert [path.name for path in lockstep.directory.iterdir()] == ["train.py"]
    assert list(temporary.iterdir()) == []


@pytest.mark.ranks(2)
def test_logs_of_a_plain_script_that_fails_stay(
    lockstep: Lockstep, tmp_path_factory: pytest.TempPathFactory
) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    script = lockstep.script(f"{PRINTS}\nif os.environ['RANK'] == '1': os._exit(3)")
    done = lockstep("run", "-n", "2", script, env={"TMPDIR": str(temporary)})
    assert done.code == 1
    (logs,) = temporary.iterdir()
    assert done.err.endswith(f"  | I am 1\n  log: {logs}/rank-1.log\n")
    assert (logs / "rank-1.log").read_text() == "I am 1\n"
    assert not (lockstep.directory / "runs").exists()


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (["--run-dir", "here"], "here/logs"),
        (["--log-dir", "here", "--rdzv-id", "job"], "here/job_*"),
        (["-r", "3"], "runs/train/*/logs"),
        (["--tee", "0:3,1:3"], "runs/train/*/logs"),
    ],
)
@pytest.mark.ranks(2)
def test_logs_of_a_plain_script_are_where_they_are_asked_for(
    lockstep: Lockstep, flags: list[str], where: str
) -> None:
    done = lockstep("run", "-n", "2", *flags, lockstep.script(PRINTS))
    assert (done.code, done.err) == (0, "")
    (logs,) = lockstep.directory.glob(where)
    assert [(logs / f"rank-{k}.log").read_text() for k in (0, 1)] == ["I am 0\n", "I am 1\n"]


@pytest.mark.ranks(2)
def test_a_script_that_is_not_seen_to_make_a_run_has_its_directory(lockstep: Lockstep) -> None:
    lockstep.script(
        "import lockstep\ndef work():\n    with lockstep.Run('inner'): pass", "inner.py"
    )
    done = lockstep("run", "-n", "2", lockstep.script(f"{PRINTS}\n__import__('inner').work()"))
    assert done.code == 0, done.err
    (run,) = lockstep.directory.glob("runs/train/*")
    assert (run / "run.json").exists()
    assert "I am 1" in (run / "logs/rank-1.log").read_text()


# What the terminal shows.


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["-t", "0"], ["I am 0", "I am 1"]),
        (["--tee=3"], ["[rank 0] I am 0", "[rank 1] I am 1"]),
        (["-r", "0:3"], ["I am 1"]),
        (["-r3"], []),
        (["--local-ranks-filter", "1"], ["I am 1"]),
        (["--tee", "3", "--local_ranks_filter=1"], ["[rank 1] I am 1"]),
    ],
)
@pytest.mark.ranks(2)
def test_streams(lockstep: Lockstep, flags: list[str], shown: list[str]) -> None:
    done = lockstep("run", "--nproc_per_node=2", *flags, lockstep.script(PRINTS))
    assert (done.code, sorted(done.out.splitlines())) == (0, shown)


# Ports.

PORT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    print(os.environ["MASTER_PORT"], flush=True)
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_world_size() > 1:
    os._exit(1)
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.ranks(2)
def test_a_port_is_kept_through_restarts_or_refused(lockstep: Lockstep, ranks: int) -> None:
    script = lockstep.script(PORT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("run", "-n", str(ranks), "--max-restarts", "1", "--master_port", port, script)
        done = lockstep(*words)
        assert done.code == 2
        assert done.err == (
            f"lockstep: error: --master-port {port} cannot be opened on this machine: address already "
            "in use; expected a free port\nhint: without --master-port, a free one is found\n"
        )
    done = lockstep(*words)
    assert (done.code, done.out) == (0, f"{port}\n" * ranks), done.err


@pytest.mark.ranks(2)
def test_several_nodes_use_the_port_that_was_asked_for(lockstep: Lockstep) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lockstep.script("import os; print(os.environ['MASTER_PORT'])")
    line = f"torchrun --nnodes 2 --node-rank {{node}} --master-addr localhost --master-port {port} -t 0"
    done = launched(lockstep, f"{line} train.py", 2)
    assert [(one.code, one.out) for one in done] == [(0, f"{port}\n")] * 2, done


# Standard input.


def typed(lockstep: Lockstep, ranks: int, text: bytes, until: bytes) -> tuple[int, bytes]:
    """Launch at a terminal of its own; type a text when the prompt has come; return all that was shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(lockstep.directory)
        words = [sys.executable, "-m", "lockstep", "run", "-n", str(ranks), "train.py"]
        os.execv(sys.executable, words)  # noqa: S606 - the terminal is made by the fork before
    shown, deadline = b"", time.monotonic() + 40
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:
                break
        if until in shown and text:
            os.write(terminal, text)
            text = b""
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.ranks(2)
def test_breakpoint_works_on_rank_0_of_a_terminal(lockstep: Lockstep, ranks: int) -> None:
    lockstep.script(
        "import os, sys\nx = 41\nif os.environ['RANK'] == '0':\n    breakpoint()\n    print('after', x)\n"
        "else:\n    assert sys.stdin.read() == ''\n"
    )
    code, shown = typed(lockstep, ranks, b"x += 1\nc\n", b"(Pdb) ")
    assert (code, b"after 42" in shown) == (0, True), shown


@pytest.mark.parametrize(("ranks", "read"), [(1, "'typed\\n'"), (2, "''")])
@pytest.mark.ranks(2)
def test_a_pipe_is_read_by_the_only_rank(lockstep: Lockstep, ranks: int, read: str) -> None:
    script = lockstep.script("import sys; print(repr(sys.stdin.read()))")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", str(ranks), script],
        cwd=lockstep.directory,
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{read}\n"


# The rest.


@pytest.mark.ranks(2)
def test_variables_of_torchrun_are_read_and_flags_win(lockstep: Lockstep) -> None:
    script = lockstep.script(
        "import os, sys; print(os.environ['ROLE_NAME'], os.environ['WORLD_SIZE'])"
    )
    env = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "trainer", "PET_TEE": "0", "PET_STANDALONE": "1"}
    assert lockstep("run", script, env=env).out == "trainer 2\n" * 2
    assert lockstep("run", "-n", "1", "--role=x", script, env=env).out == "x 1\n"
    done = lockstep("run", script, env={"PET_NPROC_PER_NODE": "many"})
    assert done.code == 2
    assert "-n is 'many'" in done.err
    assert "note: PET_* variables of the environment say --nproc-per-node=many\n" in done.err


@pytest.mark.ranks(2)
def test_a_program_without_python(lockstep: Lockstep) -> None:
    done = lockstep(
        "run", "-n", "2", "-t", "0", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE"
    )
    assert sorted(done.out.splitlines()) == ["0 of 2", "1 of 2"], done.err
    done = lockstep("run", "--no_python", "no-such-program")
    assert done.code == 2
    assert "the program no-such-program is not there" in done.err


@pytest.mark.ranks(2)
def test_what_has_no_effect_is_said_once(lockstep: Lockstep) -> None:
    words = ("--monitor-interval", "1", "--event_log_handler=console")
    done = lockstep("run", "-n", "2", *words, lockstep.script(""))
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["lockstep"] * 2
    assert (done.code, done.err.count("has no effect")) == (0, 2)


SIGNALLED = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("told", flush=True), sys.exit(0)))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("ready", "w").write("1")
time.sleep(60)
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(("signum", "told"), [(signal.SIGUSR1, "told\n"), (signal.SIGTERM, "")])
@pytest.mark.ranks(1)
def test_signals_and_the_time_that_ranks_have(
    lockstep: Lockstep, signum: signal.Signals, told: str
) -> None:
    words = ("--signals-to-handle", "SIGTERM,SIGUSR1", "--shutdown-timeout", "0.5")
    process = lockstep.start("run", *words, lockstep.script(SIGNALLED))
    lockstep.wait_for("ready")
    process.send_signal(signum)
    began = time.monotonic()
    done = lockstep.finish(process)
    assert (done.code, done.out) == (128 + signum, told)
    assert time.monotonic() - began < 4
