"""Scripts that leave their process group while one of its threads still wants the interpreter's lock."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.forked

#: The thread comes late by design: its collective holds a Python object, and nothing gives it the lock
#: between the end of the collective and the end of the function.
LATE = """
import ctypes, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def leave(model):
    group = model.process_group
    dist.destroy_process_group()
    torch._C._stash_obj_in_tls("note", object())
    group.barrier()
    torch._C._remove_obj_from_tls("note")
    ctypes.PyDLL(None).usleep(200_000)

def main():
    sys.setswitchinterval(600)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(2, 2))
    leave(model)
    return model
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    "end",
    [
        pytest.param("main()", id="the-model-goes-last"),  # joins the thread: hung without end
        pytest.param(
            "model = main()", id="the-interpreter-goes-first"
        ),  # aborted the thread: SIGABRT
        pytest.param("model = main()\nsys.exit()", id="by-sys-exit"),
    ],
)
@pytest.mark.ranks(2)
def test_a_late_thread_neither_hangs_nor_aborts_a_script_that_has_ended(lockstep, end):
    done = lockstep("run", "-n", "2", "-r", "1:3", lockstep.script(LATE + end + '\nprint("end")'))
    assert (done.code, done.err) == (0, "")
    assert done.out == ("" if "exit" in end else "end\n")


AGAIN = """
import os, torch, torch.distributed as dist

def use(tag):
    store = dist.PrefixStore(tag, STORE)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()

STORE = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
counts = []
for turn in range(40):
    use(str(turn))
    counts.append(len(os.listdir("/proc/self/fd")))
print(max(counts[20:]) <= max(counts[:20]))
"""


@pytest.mark.wide
@pytest.mark.ranks(2)
def test_groups_made_and_destroyed_for_ever_do_not_pile_up(lockstep):
    done = lockstep("run", "-n", "2", "-r", "1:3", lockstep.script(AGAIN))
    assert (done.code, done.err, done.out) == (0, "", "True\n")


FORKED = """
import torch.distributed as dist
import lockstep
from lockstep.world import groups

def use():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups.keep(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    return "used"

use()
print(lockstep.launch(use, 1, start="fork"))
"""


@pytest.mark.ranks(1)
def test_groups_of_the_process_that_a_worker_was_forked_from_are_not_its_own(lockstep):
    done = lockstep.python(
        lockstep.script(FORKED)
    )  # its threads stayed behind: joining them was a SIGSEGV
    assert (done.code, done.out) == (0, "['used']\n"), done.err
