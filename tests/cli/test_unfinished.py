"""A run that has not finished: the next start of its command names it, and `--resume` continues it."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Done, Lockstep
from tests.template import Template

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]

SCRIPT = """
import os, signal, sys, time
import torch
import torch.nn.functional as F
import lockstep

torch.manual_seed(0)
DATA = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))

def main():
    with lockstep.Run("other-name", replicas=2, progress=False) as run:
        model = run.model(torch.nn.Linear(4, 3))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
        train = run.loader(DATA, batch_size=4, shuffle=True)
        for epoch in run.epochs(2):
            for x, y in train:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if run.step == int(os.environ.get("SAVE", "-1")):
                    run.save()
                if run.step >= int(os.environ.get("HALT", "999")):
                    open(f"halted-{run.world.rank}", "w").write(str(os.getpid()))
                    time.sleep(0.05 if "SLOW" in os.environ else 60)

if __name__ == "__main__":
    main()
"""
WORDS = ("-n", "2", "train.py", "--lr", "0.1")


def digest(done: Done) -> str:
    (found,) = re.findall(
        r"^lockstep: finished steps=24 .*digest=(sha256:\w+)$", done.out, re.MULTILINE
    )
    return str(found)


def preempted(lockstep: Lockstep, *words: str, **start: Any) -> Done:
    """Start a command, and ask it to end after step 10."""
    process = lockstep.start(*words, env={"HALT": "10", "SLOW": "1"}, **start)
    lockstep.wait_for("halted-0")
    process.send_signal(signal.SIGTERM)
    done = lockstep.finish(process)
    (lockstep.directory / "halted-0").unlink()
    assert done.code == 75, done
    return done


def killed(lockstep: Lockstep, *words: str, saved: int) -> None:
    """Start a command, and kill it; `saved` is how many runs have a checkpoint then, `0` for no save."""
    process = lockstep.start("run", *words, env={"SAVE": "10" if saved else "-1", "HALT": "12"})
    lockstep.wait_for("halted-0", "halted-1")
    await_checkpoints(lockstep, saved)
    process.kill()
    lockstep.finish(process)
    for file in lockstep.directory.glob("halted-*"):
        file.unlink()


def await_checkpoints(lockstep: Lockstep, count: int) -> None:
    """Wait until so many runs have a checkpoint."""
    deadline = time.monotonic() + 20
    while len(list(lockstep.directory.glob("runs/*/*/checkpoints/step-*/manifest.json"))) < count:
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.05)


def runs(lockstep: Lockstep) -> list[str]:
    """Return the run directories, in order of time."""
    found = sorted(lockstep.directory.glob("runs/*/*/run.json"))
    return [str(one.parent.relative_to(lockstep.directory)) for one in found]


def test_a_preempted_run_is_named_and_continues_when_asked(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    first = preempted(lockstep, "run", *WORDS)
    (directory,) = runs(lockstep)
    step = int(re.findall(r"preempted after step (\d+)", first.err)[0])
    assert f"to continue: lockstep run --run-dir {directory} -n 2 train.py --lr 0.1" in first.err

    other = lockstep("run", "-n", "2", "train.py", "--lr", "0.2")
    assert (other.code, "unfinished" in other.err) == (0, False), "other arguments are another run"

    anew = lockstep("run", *WORDS)
    named = (
        f"lockstep: unfinished run {directory} at step {step}: continue it with --resume or "
        f"--run-dir {directory}\n"
    )
    assert (anew.code, named in anew.err, len(runs(lockstep))) == (0, True, 3)

    resumed = lockstep("run", "--resume", *WORDS)
    assert (resumed.code, len(runs(lockstep))) == (0, 3), resumed
    assert digest(resumed) == digest(anew)
    assert "unfinished" not in resumed.err

    none = lockstep("run", "--resume", *WORDS)
    assert none.code == 2
    assert "--resume: there is no unfinished run of train.py --lr 0.1 in runs;" in none.err
    assert "unfinished" not in lockstep("run", *WORDS).err, "they have all finished"


def test_the_printed_command_continues(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT, "a dir/train.py")
    words = ("run", "--run-dir=r", "-n", "2", "a dir/train.py", "--name", "it's")
    command = re.findall(r"to continue: lockstep (.*)", preempted(lockstep, *words).err)[0]
    assert command == "run --run-dir r -n 2 'a dir/train.py' --name 'it'\"'\"'s'"
    done = lockstep(*shlex.split(command))
    assert (done.code, runs(lockstep)) == (0, []), done
    undisturbed = lockstep("run", "-n", "2", "a dir/train.py", "--name", "it's")
    assert digest(done) == digest(undisturbed)


def test_the_newest_of_several_continues(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    for saved in (1, 2):
        killed(lockstep, *WORDS, saved=saved)
    newest = runs(lockstep)[-1]
    killed(lockstep, *WORDS, saved=0)  # without a checkpoint there is nothing to continue
    anew = lockstep("run", "--replicas", "2", *WORDS)
    assert f"unfinished run {newest} at step 10 (and 1 older):" in anew.err
    done = lockstep("run", "--resume", *WORDS)
    assert digest(done) == digest(anew)
    assert (
        f"continue it with --resume or --run-dir {runs(lockstep)[0]}\n"
        in lockstep("run", *WORDS).err
    )
    assert "unfinished" not in lockstep("run", "--replicas", "3", *WORDS).err, "another run"


def test_a_run_that_lives_is_neither_named_nor_continued(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    living = lockstep.start("run", *WORDS, env={"SAVE": "10", "HALT": "12"})
    lockstep.wait_for("halted-0", "halted-1")
    await_checkpoints(lockstep, 1)
    refused = lockstep("run", "--resume", *WORDS)
    assert (refused.code, "no unfinished run" in refused.err) == (2, True)
    assert "unfinished" not in lockstep("run", *WORDS).err
    living.kill()
    lockstep.finish(living)


def test_what_contradicts_it(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    fresh = lockstep("run", "--resume", "--fresh", *WORDS)
    assert (fresh.code, "--resume and --fresh contradict" in fresh.err) == (2, True)
    nothing = lockstep("run", "--resume", "--run-dir", "new", *WORDS)
    assert (nothing.code, "no unfinished run of train.py --lr 0.1 in new" in nothing.err) == (
        2,
        True,
    )
    variable = lockstep("run", *WORDS, env={"LOCKSTEP_RESUME": "1"})
    assert (variable.code, "LOCKSTEP_RESUME: there is no" in variable.err) == (2, True)
    assert [path.name for path in lockstep.directory.iterdir()] == ["train.py"]


def test_under_python_the_variable_continues(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    # Not from the template, whose own command line a forked process has.
    python = str(Path(sys.executable).with_name("python3"))
    first = preempted(lockstep, "train.py", "7", program=(), executable=python)
    (directory,) = runs(lockstep)
    assert directory.startswith("runs/other-name/")
    assert f"to continue: LOCKSTEP_RUN_DIR={directory} python train.py 7\n" in first.err
    anew = lockstep.python("train.py", "7")
    assert re.search(
        rf"^lockstep: unfinished run {directory} at step \d+: continue it with LOCKSTEP_RESUME=1 or "
        rf"LOCKSTEP_RUN_DIR={directory}$",
        anew.err,
        re.MULTILINE,
    )
    done = lockstep("run", "-n", "2", "--resume", "train.py", "7")
    assert digest(done) == digest(anew), "a launcher continues it as well"
    none = lockstep.python("train.py", "7", env={"LOCKSTEP_RESUME": "1"})
    assert (none.code, "LOCKSTEP_RESUME=1: there is no unfinished run of" in none.err) == (1, True)
    assert "LOCKSTEP_RUN_DIR=DIR continues" in none.err


def test_python_continues_what_a_launcher_began(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    preempted(lockstep, "run", "-n", "2", "train.py", "7")
    done = lockstep.python("train.py", "7", env={"LOCKSTEP_RESUME": "1"})
    assert (done.code, len(runs(lockstep))) == (0, 1)
    assert digest(done) == digest(lockstep.python("train.py", "7"))


def test_all_launchers_agree_on_the_directory(lockstep: Lockstep, template: Template) -> None:
    """The first launcher has the run; the other one has another disk, where it finds none."""
    other = Lockstep(lockstep.directory / "b", template)  # directories stand for the disks of nodes
    for node in (lockstep, other):
        node.script(SCRIPT)
    preempted(lockstep, "run", "-n", "2", "train.py", "7")
    (directory,) = runs(lockstep)

    def both(resume: tuple[bool, bool]) -> list[Done]:
        started = []
        for rank, (node, asks) in enumerate(zip((lockstep, other), resume, strict=True)):
            own = ("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1")
            words = ("run", *own, *(("--resume",) * asks), "train.py", "7")
            started.append(node.start(*words))
        return [lockstep.finish(process) for process in started]

    refused = both((False, True))
    assert refused[1].code == 2
    assert "--resume: there is no unfinished run of train.py 7 in runs;" in refused[1].err
    assert refused[0].code == 2, "the first launcher hears why"
    done = both((True, True))
    assert [one.code for one in done] == [0, 0], done
    assert (lockstep.directory / "b" / directory / "logs").is_dir()
    assert digest(done[0]) == digest(lockstep("run", "train.py", "7"))
