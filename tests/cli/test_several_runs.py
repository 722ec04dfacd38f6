"""A script with two runs, one after the other: what is kept when a rank dies in the second."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.errors import PREEMPTED

pytestmark = pytest.mark.forked

SCRIPT = """
import os, signal, sys, time
import torch
import lockstep

STRIKES = {"dies": signal.SIGKILL, "is-preempted": signal.SIGTERM}

class Late:
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def train(name, rate, pause, dies=False):
    # The script prints its steps: an extra pass would print one twice.
    with lockstep.Run(name, replicas=2, audit="off") as run:
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=rate))
        loader = run.loader([torch.tensor([float(i), 1.0]) for i in range(20)], batch_size=4, shuffle=True)
        for _ in run.epochs(3):
            for x in loader:
                time.sleep(pause)
                run.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if run.is_main_process:
                    print(name, "step", run.step, flush=True)
                if dies and run.step >= 10 and run.world.rank == 1 and not os.path.exists("struck"):
                    open("struck", "w").close()
                    os.kill(os.getpid(), STRIKES[sys.argv[1]])
        # What follows the last epoch happens once: what goes on stands before it.
        run.register("late", Late())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.5)
        if sys.argv[1:] == ["is-preempted-in-between"] and not os.path.exists("struck"):
            open("struck", "w").close()
            os.kill(os.getpid(), signal.SIGTERM)

train("first", 0.01, 0.05)
train("second", 0.02, 0.01, dies=sys.argv[1:] and sys.argv[1] in STRIKES)
"""


def digests(text: str) -> list[str]:
    return re.findall(r"digest=(sha256:\w+)", text)


def steps(text: str, name: str) -> list[int]:
    return [int(step) for step in re.findall(rf"^{name} step (\d+)$", text, re.MULTILINE)]


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoints/step-*"))


def goes_on(numbers: list[int]) -> bool:
    """Whether steps go on to the last one of a run, not from its first."""
    return numbers[:1] > [1] and numbers == list(range(numbers[0], 16))


def second_after_death(text: str) -> list[int]:
    return steps(text.rpartition("digest=")[0].rpartition("digest=")[2], "second")


@pytest.mark.ranks(2)
def test_neither_run_loses_what_is_kept_of_it(lockstep):
    script = lockstep.script(SCRIPT)
    undisturbed = lockstep.python(script)
    assert undisturbed.code == 0, undisturbed.err
    first, second = digests(undisturbed.out)
    assert first != second

    # The first has checkpoints on disk, the second is in memory alone.
    words = ("--strategy", "fsdp", "--run-dir", "run", "--checkpoint-every", "0.5")
    done = lockstep("run", "-n", "2", *words, script, "dies")
    assert done.code == 0, done.err
    assert "restart 1, from the newest snapshot or checkpoint of run 2 in the script" in done.err
    assert digests(done.out) == [first, first, second], "the first ends twice, with the same bits"
    again = steps(done.out, "first")[15:]
    assert not again or goes_on(again), "it goes on from its newest checkpoint"
    assert saved(lockstep.directory / "run")
    assert goes_on(second_after_death(done.out)), "from memory"


@pytest.mark.ranks(2)
def test_a_short_first_run_is_repeated_and_leaves_the_second_in_memory(lockstep):
    script = lockstep.script(SCRIPT)
    done = lockstep("run", "-n", "2", "--run-dir", "run", script, "dies")
    assert done.code == 0, done.err
    assert steps(done.out, "first") == [*range(1, 16), *range(1, 16)]
    assert goes_on(second_after_death(done.out))
    assert saved(lockstep.directory / "run") == []
    first, again, _ = digests(done.out)
    assert first == again


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("when", ["is-preempted", "is-preempted-in-between"])
@pytest.mark.ranks(2)
def test_a_launch_that_was_preempted_in_the_second_goes_on_there(lockstep, when):
    words = ("run", "-n", "2", "--run-dir", "run", lockstep.script(SCRIPT), when)
    stopped = lockstep(*words)
    assert stopped.code == PREEMPTED, stopped.err
    (first,) = digests(stopped.out)
    done = lockstep(*words)
    assert done.code == 0, done.err
    assert digests(done.out)[0] == first
    assert goes_on(steps(done.out, "second"))
    again = lockstep(*words)
    assert again.code == 0, again.err
    assert "lockstep: finished already" in again.err
