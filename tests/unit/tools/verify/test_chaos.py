"""Random kills of a made-up launcher: launcher, fork server, workers that write traces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.tools.verify.chaos import Chaos, Kill, draw

#: Arguments: trace directory, number of steps. Each generation goes on where the last one was killed.
LAUNCHER = """
import json, os, signal, sys, time
trace, steps = sys.argv[1], int(sys.argv[2])

def work(rank, generation, done):
    os.dup2(os.open(f"{trace}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT), 1)
    with open(f"{trace}/rank-{rank}.{generation}.jsonl", "w", buffering=1) as file:
        print(json.dumps({"kind": "begin", "step": done}), file=file)
        for step in range(done + 1, steps + 1):
            time.sleep(0.02)
            print(json.dumps({"kind": "step", "step": step, "digest": ""}), file=file)
    time.sleep(3.0)  # the kills may be late, on a machine with other work

def generation(number, done):
    workers = []
    for rank in range(2):
        workers.append(os.fork())
        if not workers[-1]:
            work(rank, number, done)
            os._exit(0)
    first, status = os.wait()
    for pid in workers:
        if status and pid != first:
            os.kill(pid, signal.SIGKILL)
    status += os.wait()[1]
    written = f"{trace}/rank-0.{number}.jsonl"  # missing if rank 0 was killed before it opened the file
    lines = list(open(written)) if os.path.exists(written) else []
    return status, json.loads(lines[-1])["step"] if lines else done

if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
number, status, done = 0, 1, 0
while status:
    status, done = generation(number, done)
    number += 1
    time.sleep(0.05)  # no launcher is faster
os._exit(min(number - 1, 250))
"""


def random_kills(directory: Path, kills: list[Kill], steps: int = 20) -> tuple[int, int]:
    """Return how many workers were killed, and how many deaths there were."""
    words = [sys.executable, "-c", LAUNCHER, str(directory), str(steps)]
    launcher = subprocess.Popen(words)
    try:
        kills = Chaos(launcher, directory, steps).work(kills)
        return kills, launcher.wait(timeout=20)
    finally:
        launcher.kill()
        launcher.wait()


def reached_by(directory: Path, generation: int) -> int:
    """Return the last step that a generation has written, on any rank."""
    files = directory.glob(f"rank-*.{generation}.jsonl")
    lines = [file.read_text().splitlines() for file in files]
    return max(int(json.loads(written[-1])["step"]) for written in lines if written)


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_random_kills_are_drawn_by_their_seed(count: int) -> None:
    kills = draw(count, 1, steps=40)
    assert kills == draw(count, 1, steps=40)
    assert kills != draw(count, 2, steps=40)
    assert len(kills) == count
    steps = [kill.step for kill in kills]
    assert steps == sorted(steps)
    assert steps[0] >= 0
    assert steps[-1] <= 39
    if count > 1:
        assert (steps[0], steps[-1]) == (0, 39)


def test_a_run_of_one_step_has_its_kills() -> None:
    assert {kill.step for kill in draw(5, 0, steps=1)} == {0}


def test_every_random_kill_ends_a_generation(tmp_path: Path) -> None:
    assert random_kills(tmp_path, draw(12, 3, steps=20)) == (12, 12)


def test_a_kill_waits_for_its_step(tmp_path: Path) -> None:
    kills = [Kill(5, hasty=False, delay=0.5, choice=0.9), Kill(9, False, 0.0, 0.0)]
    assert random_kills(tmp_path, kills) == (2, 2)
    reached = [reached_by(tmp_path, generation) for generation in range(2)]
    # This machine may be busy: a kill comes late, and never early.
    assert 5 <= reached[0] < reached[1]
    assert reached[1] >= 9


def test_a_run_that_ends_before_the_storm_does(tmp_path: Path) -> None:
    assert random_kills(tmp_path, [Kill(0, True, 0.0, 0.0), Kill(99, False, 0.0, 0.0)]) == (1, 1)
