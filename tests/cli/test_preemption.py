"""A launcher that is asked for room: its run saves itself, and all ends with a code of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.forked

#: Opens a run by hand, and handles SIGTERM as a run does: a moment's work, then exit code 75.
RUN = """
import os, signal, subprocess, sys, time
from lockstep.state.checkpoint.shared_memory import StatusPage, Descriptors
generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
slot = StatusPage(Descriptors.find(os.environ).page).slot(int(os.environ["LOCKSTEP_SLOT"].split("/")[0]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
def leave(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.3)
    assert child.poll() is None, "the signal has reached a data loader"
    child.kill()
    child.wait()
    {leave}
    sys.exit(75)
def begin():
    signal.signal(signal.SIGTERM, leave)
    slot.step = 17
    slot.pid = os.getpid()
def tell(name):
    with open(f"{{name}}-{{rank}}.draft", "w") as file:
        file.write(f"{{os.getpid()}} {{child.pid}} {{os.getppid()}}")
    os.rename(f"{{name}}-{{rank}}.draft", f"{{name}}-{{rank}}")
{begin}
time.sleep(100)
"""
OPEN = 'begin(); tell("open")'


def started(lockstep, *words: str, leave: str = "", begin: str = OPEN) -> subprocess.Popen[str]:
    """Start a run of two ranks."""
    script = lockstep.script(RUN.format(leave=leave, begin=begin))
    return lockstep.start("run", "-n", "2", "--run-dir", "r", *words, script)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, ()), (signal.SIGUSR1, ("--preempt-signal", "USR1", "--start", "exec"))],
)
@pytest.mark.ranks(2)
def test_run_saves_itself_and_leaves(lockstep, number, words):
    process = started(lockstep, *words)
    lockstep.wait_for("open-0", "open-1")
    process.send_signal(number)
    done = lockstep.finish(process, 20)
    assert done.code == 75
    command = shlex.join(["lockstep", "run", "--run-dir", "r", "-n", "2", *words, "train.py"])
    assert done.err == (f"lockstep: preempted after step 17; to continue: {command}\n")


@pytest.mark.ranks(2)
def test_an_interrupt_lets_a_run_save_itself_with_its_data_loaders(lockstep):
    process = started(lockstep, leave='tell("saved")')
    lockstep.wait_for("open-0", "open-1")
    process.send_signal(signal.SIGINT)
    lockstep.wait_for("saved-0", "saved-1")
    done = lockstep.finish(process, 20)
    assert done.code == 130
    assert done.err == "lockstep: stopped by SIGINT; logs: r/logs\n"  # nothing to resume from


@pytest.mark.ranks(2)
def test_second_signal_ends_at_once(lockstep):
    process = started(lockstep, leave='tell("told"); time.sleep(100)')
    pids = " ".join(lockstep.wait_for("open-0", "open-1")).split()
    process.send_signal(signal.SIGTERM)
    lockstep.wait_for("told-0", "told-1")
    process.send_signal(signal.SIGTERM)
    done = lockstep.finish(process, 4)
    assert (done.code, "lockstep: stopped by SIGTERM" in done.err) == (143, True)
    assert all(lockstep.gone(int(pid), 1) for pid in pids)


@pytest.mark.ranks(2)
def test_rank_that_fails_meanwhile_is_the_verdict(lockstep):
    process = started(lockstep, leave='if rank == 1: raise ValueError("not saved")')
    lockstep.wait_for("open-0", "open-1")
    process.send_signal(signal.SIGTERM)
    done = lockstep.finish(process, 20)
    assert (done.code, "ValueError: not saved" in done.err) == (1, True)


def every_process(pids: list[list[int]]) -> None:
    """Signal all processes of the launch but the launcher, as Slurm does: some of them twice."""
    for pid in {pids[0][0], pids[1][0], pids[0][2]}:
        os.kill(pid, signal.SIGTERM)


def the_workers(pids: list[list[int]]) -> None:
    """Signal the workers alone."""
    for pid in (pids[0][0], pids[1][0]):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("whom", [every_process, the_workers])
@pytest.mark.ranks(2)
def test_signals_that_the_launcher_does_not_get(lockstep, whom: Callable[[list[list[int]]], None]):
    process = started(lockstep)
    whom([list(map(int, text.split())) for text in lockstep.wait_for("open-0", "open-1")])
    assert lockstep.finish(process, 20).code == 75


@pytest.mark.ranks(2)
def test_signal_between_two_generations_waits_for_the_next(lockstep):
    begin = """
if generation == 0:
    begin()
    if rank == 1: time.sleep(0.2); os.kill(os.getpid(), 9)
else:
    tell("born")
    time.sleep(0.6)
    begin()
"""
    process = started(lockstep, begin=begin)
    lockstep.wait_for("born-0", "born-1")
    process.send_signal(signal.SIGTERM)
    assert lockstep.finish(process, 20).code == 75


@pytest.mark.ranks(2)
def test_signal_after_the_run_ends_the_script(lockstep):
    over = "; signal.signal(signal.SIGTERM, signal.SIG_DFL)"
    process = started(lockstep, begin='begin(); tell("open")' + over + '; tell("over")')
    lockstep.wait_for("over-0", "over-1")
    process.send_signal(signal.SIGTERM)
    done = lockstep.finish(process, 20)
    assert (done.code, "lockstep: stopped by SIGTERM" in done.err) == (143, True)


@pytest.mark.ranks(2)
def test_launched_function_leaves_with_the_code(lockstep):
    body = RUN.format(leave="", begin=OPEN).strip().splitlines()
    script = lockstep.script(
        "import lockstep\ndef main():\n"
        + "".join(f"    {line}\n" for line in body)
        + "if __name__ == '__main__':\n    lockstep.launch(main, n=2, run_dir='r')\n"
    )
    process = lockstep.start(script, program=())
    lockstep.wait_for("open-0", "open-1")
    process.send_signal(signal.SIGTERM)
    done = lockstep.finish(process, 20)
    assert (done.code, done.err.count("lockstep: preempted after step 17")) == (75, 1)
