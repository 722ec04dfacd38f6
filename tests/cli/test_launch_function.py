"""`lockstep.launch` from scripts, with real processes."""

from __future__ import annotations

import pytest

HEAD = """
import os, sys, time, warnings
import torch
import torch.distributed as dist
import lockstep.launch

def total(offset):
    dist.init_process_group("gloo")
    x = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(x)
    print("on", dist.get_rank())
    dist.destroy_process_group()
    return dist.__name__, x, int(os.environ["RANK"])

def fail(rank):
    if os.environ["RANK"] == str(rank):
        raise ValueError("bad data")
    time.sleep(60)

def parallel(_):
    torch.set_num_threads(2)
    return torch.ones(10**7).sum().item()

def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()
"""


def script(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"{HEAD}\nif __name__ == '__main__':\n{lines}\n    assert not children(), children()\n"


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["auto", "fork", "spawn"])
@pytest.mark.ranks(2)
def test_values_come_back_in_the_order_of_ranks(lockstep, start):
    name = lockstep.script(
        script(f"print(lockstep.launch(total, n=2, args=(10,), start={start!r}))")
    )
    done = lockstep.python(name)
    value = "('torch.distributed', tensor([21]), {})"
    assert done.out == f"on 0\n[{value.format(0)}, {value.format(1)}]\n"
    assert (done.code, done.err) == (0, "")


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_functions_that_cannot_be_imported_are_forked(lockstep):
    body = "values = [3, 4]\nprint(lockstep.launch(lambda: values[int(os.environ['RANK'])], n=2))"
    assert lockstep.python(lockstep.script(script(body))).out == "[3, 4]\n"


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_failure_carries_the_verdict_and_leaves_no_process(lockstep):
    body = """
from lockstep.errors import RunError
try:
    lockstep.launch(fail, n=2, args=(1,))
except RunError as error:
    assert 'rank 1 of 2 failed' in str(error), error
    assert 'ValueError: bad data' in str(error)
    assert 'Traceback' in error.__notes__[0]
    print('refused')
"""
    assert lockstep.python(lockstep.script(script(body))).out == "refused\n"


@pytest.mark.ranks(1)
@pytest.mark.forked
def test_a_failed_run_leaves_its_directory_to_other_processes(lockstep):
    body = """
from lockstep.errors import RunError
def train():
    with lockstep.Run('here', replicas=1):
        raise ValueError('bad data')
try:
    lockstep.launch(train, n=1, run_dir='here')
except RunError:
    print(sorted(set(os.listdir('here')) & {'run.json', '.lock'}))
"""
    assert lockstep.python(lockstep.script(script(body))).out == "['run.json']\n"


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_timeout_leaves_no_process(lockstep):
    body = """
from lockstep.errors import RunError
began = time.monotonic()
try:
    lockstep.launch(fail, n=2, args=(7,), timeout=0.5)
except RunError as error:
    assert 'did not end within 0.5 s' in str(error), error
    assert time.monotonic() - began < 5
    print('refused')
"""
    assert lockstep.python(lockstep.script(script(body))).out == "refused\n"


@pytest.mark.ranks(1)
def test_a_used_thread_pool_does_not_hang_forked_workers(lockstep):
    body = """
torch.set_num_threads(2)
x = torch.randn(200, 200, requires_grad=True)
(x @ x).sum().backward()
torch.ones(10**7).sum()
for _ in range(2):
    print(lockstep.launch(parallel, n=1, args=(0,), start='fork', timeout=20))
    torch.ones(10**7).sum()
"""
    done = lockstep.python(lockstep.script(script(body)))
    assert (done.out, done.err) == ("[10000000.0]\n" * 2, "")


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_process_group_rules_out_forks_and_says_so(lockstep):
    body = """
dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())
print(lockstep.launch(total, n=2, args=(0,))[0][1].item())
dist.destroy_process_group()
"""
    done = lockstep.python(lockstep.script(script(body)))
    assert done.out == "on 0\n1\n"
    assert done.err == (
        "lockstep: workers are spawned, not forked: "
        "a process group of torch.distributed exists in this process\n"
    )


@pytest.mark.ranks(1)
@pytest.mark.forked
def test_errors_of_use(lockstep):
    body = """
from lockstep.errors import UsageError
def refused(*args, **settings):
    try:
        lockstep.launch(*args, **settings)
    except UsageError as error:
        print(error.message.partition(';')[0].partition(':')[0])
refused(lambda: 1, n=1, start='spawn')
refused(total, n=0)
refused(total, n=1, start='thread')
refused(total, n=2, replicas=1)
"""
    out = lockstep.python(lockstep.script(script(body))).out.splitlines()
    assert "cannot be sent to a fresh interpreter" in out[0]
    assert out[1:] == ["-n is 0", "start is 'thread'", "2 ranks for 1 replica(s)"]


@pytest.mark.ranks(1)
@pytest.mark.forked
def test_a_value_that_cannot_be_pickled_is_named(lockstep):
    body = """
from lockstep.errors import RunError
try:
    lockstep.launch(lambda: (yield), n=1)
except RunError as error:
    print('cannot be pickled' in str(error))
"""
    assert lockstep.python(lockstep.script(script(body))).out == "True\n"


@pytest.mark.wide
@pytest.mark.ranks(1)
@pytest.mark.forked
def test_launching_in_a_worker_is_refused(lockstep):
    done = lockstep("run", lockstep.script(script("lockstep.launch(total, n=2)")))
    assert done.code == 2
    assert "lockstep.launch was called in a worker" in done.err


@pytest.mark.ranks(1)
@pytest.mark.forked
def test_the_parents_exit_handlers_do_not_run_in_workers(lockstep):
    body = """
import atexit
atexit.register(lambda: print('parent ends'))
lockstep.launch(lambda: atexit.register(lambda: print('worker ends')), n=1, run_dir='here')
sys.stdout.flush()
"""
    assert (
        lockstep.python(lockstep.script(script(body))).code == 1
    )  # the value, a function, cannot travel
    body = body.replace("lambda: atexit.register(lambda: print('worker ends'))", "lambda: None")
    assert lockstep.python(lockstep.script(script(body))).out == "parent ends\n"


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_replaced_standard_output_receives_the_main_rank(lockstep):
    body = """
import contextlib, io
text = io.StringIO()
with contextlib.redirect_stdout(text):
    lockstep.launch(total, n=2, args=(0,))
print(repr(text.getvalue()))
"""
    assert lockstep.python(lockstep.script(script(body))).out == "'on 0\\n'\n"
