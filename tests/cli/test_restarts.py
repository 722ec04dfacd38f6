"""Workers that die, and the generations after them: real processes, real kills."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import pytest

from tests.frozen import frozen_disk

#: What a script of these tests knows; it opens its run by hand, so that torch need not be imported.
HEAD = """
import os, signal, sys, time
from lockstep.state.checkpoint.shared_memory import StatusPage, Descriptors, Buffer
generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
memory = Descriptors.find(os.environ)
slot = StatusPage(memory.page).slot(int(os.environ["LOCKSTEP_SLOT"].split("/")[0]))
assert slot.pid == 0, "the page is of an earlier generation"
slot.pid = os.getpid()
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_TWICE = (
    HEAD
    + """
import subprocess, torch, torch.distributed as dist
print("begin", generation, flush=True)
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if rank == 0 and generation < 2:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with open(f"child-{generation}", "w") as file:
        file.write(str(child.pid))
dist.barrier()
if rank == 1 and generation < 2:
    die()
dist.barrier()
print("end", generation, x.item(), flush=True)
dist.destroy_process_group()
"""
)


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_killed_rank_costs_a_generation_each_time(lockstep):
    done = lockstep("run", "-n", "2", "--run-dir", "r", lockstep.script(KILLED_TWICE))
    assert (done.code, done.out) == (0, "begin 0\nbegin 1\nbegin 2\nend 2 2.0\n")
    # One line each: what other ranks felt of it is in the log.
    killed = "lockstep: rank 1 was killed by signal 9 (SIGKILL); restart {}\n"
    assert done.err == killed.format(1) + killed.format(2)
    logs = [(lockstep.directory / f"r/logs/rank-{k}.log").read_text() for k in (0, 1)]
    assert all(log.count("begin") == 3 for log in logs)
    children = lockstep.wait_for("child-0", "child-1")
    assert all(lockstep.gone(int(pid), 1) for pid in children)


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_memory_goes_through_exec(lockstep):
    script = lockstep.script(HEAD + "if rank == 1 and generation == 0: die()\ntime.sleep(0.2)\n")
    done = lockstep("run", "-n", "2", "--start", "exec", script)
    assert (done.code, done.err.count("; restart ")) == (0, 1)


@pytest.mark.ranks(1)
@pytest.mark.forked
def test_exception_of_the_script_ends_the_run(lockstep):
    done = lockstep("run", lockstep.script(HEAD + "raise ValueError('again and again')"))
    assert (done.code, "restart" in done.err) == (1, False)
    assert "ValueError: again and again" in done.err


@pytest.mark.wide
@pytest.mark.ranks(1)
@pytest.mark.forked
def test_failures_without_progress_are_counted(lockstep):
    done = lockstep("run", lockstep.script(HEAD + "raise OSError(28, 'No space left on device')"))
    assert done.code == 1
    told = [line for line in done.err.splitlines() if line.startswith("lockstep: ")]
    assert [line.rpartition("; ")[2] for line in told[:-1]] == [f"restart {k}" for k in (1, 2, 3)]
    assert told[-1].endswith("OSError: [Errno 28] No space left on device")
    assert "  log: runs/" in done.err


@pytest.mark.wide
@pytest.mark.ranks(1)
@pytest.mark.forked
def test_failures_with_progress_are_not(lockstep):
    script = lockstep.script(
        HEAD
        + """
buffer = Buffer(memory.buffers[generation % 2])
buffer.reserve(2, 8)
buffer.begin(0)
buffer.describe(bytes(32), b"{}", 8, 1)
buffer.commit(0, generation + 1)
if generation < 6: die()
"""
    )
    done = lockstep("run", "--max-restarts", "1", script)
    assert (done.code, done.err.count("from the newest snapshot")) == (0, 6)


@pytest.mark.wide
@pytest.mark.ranks(1)
@pytest.mark.forked
def test_any_failure_is_survived_where_the_user_says_so(lockstep):
    script = lockstep.script(
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError('once')\n"
        "print(os.environ['TORCHELASTIC_MAX_RESTARTS'])"
    )
    done = lockstep("run", "--max_restarts", "1", script)
    assert (done.code, done.out) == (0, "1\n")
    assert "lockstep: rank 0 failed: ValueError: once (train.py:2); restart 1" in done.err


def copy_sockets(pid):
    """Return descriptors of all sockets of a process: with them, its end closes none."""
    found = []
    process = os.pidfd_open(pid)
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()).startswith("socket:"):
                number = int(link.name)
                found.append(ctypes.CDLL(None).syscall(438, process, number, 0))  # pidfd_getfd
    os.close(process)
    return found


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_launcher_killed_after_a_restart_leaves_no_process(lockstep):
    script = lockstep.script(
        HEAD
        + """
if generation == 0 and rank == 1: die()
if generation == 1:
    with open(f"draft-{rank}", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()}")
    os.rename(f"draft-{rank}", f"pid-{rank}")
time.sleep(100)
"""
    )
    process = lockstep.start("run", "-n", "2", script)
    pids = " ".join(lockstep.wait_for("pid-0", "pid-1")).split()
    held = copy_sockets(process.pid)  # the end of the socket is not what tells the fork server
    assert held
    assert min(held) >= 0
    try:
        process.kill()
        lockstep.finish(process, 10)
        assert all(lockstep.gone(int(pid), 3) for pid in pids)
    finally:
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_function_survives_a_kill(lockstep):
    script = lockstep.script(
        "import lockstep\ndef main():\n"
        + "".join(f"    {line}\n" for line in HEAD.strip().splitlines())
        + "    if rank == 1 and generation == 0: die()\n    time.sleep(0.2)\n    return generation, rank\n"
        "if __name__ == '__main__':\n    print(lockstep.launch(main, n=2))\n"
    )
    done = lockstep.python(script)
    assert (done.code, done.out) == (0, "[(1, 0), (1, 1)]\n"), done.err


#: Says what each generation was born with; the first two die at once.
SHARED = (
    "import sys; before = set(sys.modules)\nimport wave, helpers, lockstep\n"
    + HEAD
    + """
print(*sorted({"helpers", "wave"} & before), flush=True)
if generation < 2:
    die()
"""
)


@pytest.mark.ranks(1)
def test_what_a_script_imports_is_there_when_its_workers_begin(lockstep):
    lockstep.script("", "helpers.py")
    script = lockstep.script(SHARED)
    done = lockstep("run", "--max-restarts", "2", script)
    assert (done.code, done.out) == (0, "wave\n" * 3), done.err
    done = lockstep("run", "--max-restarts", "2", script, env={"LOCKSTEP_PRELOAD": "0"})
    assert (done.code, done.out) == (0, "\n" * 3), done.err


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_package_that_ends_the_launchers_imports_is_left_to_the_workers(lockstep):
    lockstep.script("import os\nif 'RANK' not in os.environ:\n    os._exit(7)\n", "abrupt.py")
    script = lockstep.script("import abrupt, lockstep\nprint('imported', flush=True)")
    done = lockstep("run", "-n", "2", script)
    assert (done.code, done.out) == (0, "imported\n"), done.err


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_package_that_prints_is_left_to_the_workers(lockstep):
    """`this` prints when it is imported: once for each rank, of which the terminal shows the first."""
    script = lockstep.script(
        "import sys; before = set(sys.modules)\nimport this, wave, lockstep\n"
        "print(*sorted({'this', 'wave'} & before), flush=True)"
    )
    done = lockstep("run", "-n", "2", script)
    assert done.code == 0, done.err
    assert done.out.count("The Zen of Python") == 1
    assert done.out.splitlines()[-1] == "wave"


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_rank_that_cannot_be_killed_does_not_keep_the_launcher(lockstep, tmp_path_factory):
    with frozen_disk(tmp_path_factory.mktemp("disk")) as disk:
        script = lockstep.script(
            f"""
import os, pathlib, time
if os.environ["RANK"] == "1":
    pathlib.Path("pid").write_text(str(os.getpid()))
    pathlib.Path({str(disk)!r}, "device").write_text("1")
while not pathlib.Path("pid").exists():
    time.sleep(0.01)
raise ValueError("enough")
"""
        )
        done = lockstep("run", "-n", "2", "--shutdown-timeout", "0.1", script, timeout=60)
        pid = int((lockstep.directory / "pid").read_text())
        left = f"lockstep: SIGKILL has not ended rank 1 (process {pid}) within 5 s"
        assert (done.code, done.err.count(left)) == (1, 1)
        assert "ValueError: enough" in done.err
    assert lockstep.gone(pid, 10)
