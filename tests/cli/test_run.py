"""`lockstep run`, with real processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

COLLECTIVE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("sum", x[0].item(), "of", dist.get_world_size(), sys.argv[1:], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
@pytest.mark.ranks(2)
def test_plain_distributed_script_runs_unchanged(lockstep, start):
    done = lockstep(
        "run", "-n", "2", "--start", start, lockstep.script(COLLECTIVE), "--lr", "1", "-n", "9"
    )
    assert done.out == "sum 3.0 of 2 ['--lr', '1', '-n', '9']\n"
    assert (done.code, done.err) == (0, "")


@pytest.mark.ranks(4)
@pytest.mark.forked
def test_four_ranks_on_fewer_cores(lockstep):
    assert lockstep("run", "-n", "4", lockstep.script(COLLECTIVE)).out == "sum 10.0 of 4 []\n"


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_each_rank_has_a_log_file(lockstep):
    script = lockstep.script("import os; print('I am', os.environ['RANK'])")
    done = lockstep("run", "-n", "2", "--run-dir", "here", script)
    logs = lockstep.directory / "here" / "logs"
    assert done.out == "I am 0\n"
    assert [(logs / f"rank-{rank}.log").read_text() for rank in (0, 1)] == ["I am 0\n", "I am 1\n"]
    assert (logs / "rank-0.log").stat().st_mode & 0o077 == 0


@pytest.mark.ranks(3)
@pytest.mark.forked
def test_tee_shows_every_rank_with_prefix(lockstep):
    script = lockstep.script("import os; print('a\\nb', os.environ['RANK'], end='')")
    done = lockstep("run", "-n", "3", "--tee", "3", script)
    expected = {f"[rank {rank}] {line}" for rank in range(3) for line in ("a", f"b {rank}")}
    assert set(done.out.splitlines()) == expected


@pytest.mark.ranks(1)
def test_all_output_arrives_in_order_and_unchanged(lockstep):
    script = lockstep.script(
        "import sys\nfor i in range(50000): print(i, 'x' * 20)\nsys.stdout.buffer.write(b'\\xff\\r\\0end')"
    )
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--run-dir", "here", script],
        cwd=lockstep.directory,
        capture_output=True,
        timeout=60,
        check=True,
    )
    lines = process.stdout.split(b"\n")
    assert len(lines) == 50001
    assert lines[49999].startswith(b"49999 ")
    assert lines[-1] == b"\xff\r\0end"
    assert (lockstep.directory / "here/logs/rank-0.log").read_bytes() == process.stdout


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_script_sees_a_process_of_its_own(lockstep, start):
    lockstep.script("VALUE = 7", "helpers.py")
    script = lockstep.script(
        "import json, os, signal, sys, threading, helpers, lockstep\n"
        "import __main__\n"
        "print(json.dumps({'name': __name__, 'file': __file__, 'path': sys.path[0], 'argv': sys.argv,\n"
        "  'main': __main__.__dict__ is globals(), 'value': helpers.VALUE,\n"
        "  'term': signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,\n"
        "  'hup': signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,\n"
        "  'int': signal.getsignal(signal.SIGINT) is signal.default_int_handler,\n"
        "  'threads': threading.active_count(), 'stdin': sys.stdin.read(),\n"
        "  'leader': os.getsid(0) == os.getpid(), 'cli': 'lockstep.cli' in sys.modules}))\n"
    )
    seen = json.loads(lockstep("run", "--start", start, script, "a b").out)
    assert seen == {
        "name": "__main__",
        "file": str(lockstep.directory / "train.py"),
        "path": str(lockstep.directory),
        "argv": ["train.py", "a b"],
        "main": True,
        "value": 7,
        "term": True,
        "hup": True,
        "int": True,
        "threads": 1,
        "stdin": "",
        "leader": True,
        "cli": start == "fork",
    }


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.forked
def test_module_runs_as_with_python_m(lockstep, start):
    lockstep.script("", "pkg/__init__.py")
    lockstep.script(
        "import sys\nfrom pkg import part\n"
        "print(__name__, __package__, __spec__.name, sys.argv[1:], part.X)",
        "pkg/train.py",
    )
    lockstep.script("X = 5", "pkg/part.py")
    done = lockstep("run", "--start", start, "-m", "pkg.train", "--lr", "1")
    assert done.out == "__main__ pkg pkg.train ['--lr', '1'] 5\n"


@pytest.mark.ranks(1)
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.forked
def test_missing_module_is_a_usage_error(lockstep, start):
    done = lockstep("run", "--start", start, "-m", "no.such.module")
    assert done.code == 2
    assert "there is no module 'no.such.module'" in done.err


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spelling", ["local-rank", "local_rank"])
@pytest.mark.forked
def test_legacy_local_rank(lockstep, spelling):
    script = lockstep.script("import sys; print(sys.argv[1:])")
    done = lockstep("run", "-n", "2", "--tee", "3", f"--legacy-{spelling}", script, "x")
    assert set(done.out.splitlines()) == {f"[rank {k}] ['--{spelling}={k}', 'x']" for k in (0, 1)}


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
def test_interpreter_ends_properly(lockstep, start):
    script = lockstep.script(
        "import atexit, sys, threading, time, torch\n"
        "atexit.register(lambda: print('atexit'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "left_open = open('left-open', 'w'); left_open.write('flushed')\n"
        "sys.stdout.write('main ')\n"
    )
    done = lockstep("run", "--start", start, script)
    assert (done.code, done.out) == (0, "main thread\natexit\n")
    assert (lockstep.directory / "left-open").read_text() == "flushed"


@pytest.mark.wide(beyond=5)
@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(5)", 1, "exit code 5"),
        ("sys.exit('no data')", 1, "no data"),
        ("os._exit(9)", 1, "exit code 9"),
    ],
)
@pytest.mark.ranks(1)
@pytest.mark.forked
def test_exit_codes(lockstep, start, statement, code, said):
    done = lockstep("run", "--start", start, lockstep.script(f"import os, sys; {statement}"))
    assert done.code == code
    assert said in done.err
    assert ("failed" in done.err) == bool(code)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("error", "code"), [("UsageError", 2), ("CheckFailedError", 3), ("RunError", 1)]
)
@pytest.mark.ranks(1)
@pytest.mark.forked
def test_exit_code_of_a_lockstep_error_is_passed_on(lockstep, error, code):
    script = lockstep.script(
        f"from lockstep.errors import {error}\nraise {error}('seen', hint='do this')"
    )
    done = lockstep("run", script)
    assert done.code == code
    assert f"{error}: seen\n  at train.py:2 in <module>\n  hint: do this" in done.err


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = = 3", "SyntaxError: invalid syntax"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_script_that_fails_at_import(lockstep, start, text, said):
    done = lockstep("run", "-n", "2", "--start", start, lockstep.script(text))
    assert done.code == 1
    assert said in done.err
    assert "at train.py:1" in done.err
    assert "lockstep/launch" not in done.err


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_exception_in_one_rank_before_the_group_exists(lockstep):
    script = lockstep.script(
        "import os, torch.distributed as dist\n"
        "def prepare():\n"
        "    if os.environ['RANK'] == '1': raise ValueError('bad data')\n"
        "prepare()\n"
        "dist.init_process_group('gloo')\n"
    )
    done = lockstep("run", "-n", "2", "--run-dir", "here", script, timeout=20)
    assert done.code == 1
    verdict = done.err.splitlines()[-3:]
    assert verdict[0].startswith("lockstep: rank 1 of 2 failed on ")
    assert verdict[0].endswith(": ValueError: bad data")
    assert verdict[1] == "  at train.py:3 in prepare"
    assert verdict[2] == "  log: here/logs/rank-1.log"
    assert "ValueError: bad data" in (lockstep.directory / "here/logs/rank-1.log").read_text()


IN_COLLECTIVE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    {}
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.ranks(3)
@pytest.mark.forked
def test_exception_in_one_rank_while_others_wait(lockstep, start):
    script = lockstep.script(IN_COLLECTIVE.format("raise KeyError('gone')"))
    done = lockstep("run", "-n", "3", "--start", start, script, timeout=30)
    assert done.code == 1
    verdict = done.err[done.err.index("lockstep: rank 1 of 3 failed") :]
    assert "KeyError: 'gone'" in verdict


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("SIGKILL", "signal 9 (SIGKILL): "),
        ("SIGSEGV", "signal 11 (SIGSEGV): a fault in native code"),
    ],
)
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_worker_killed_by_signal(lockstep, number, said):
    action = f"import signal; os.kill(os.getpid(), signal.{number})"
    done = lockstep("run", "-n", "2", lockstep.script(IN_COLLECTIVE.format(action)), timeout=30)
    assert done.code == 1
    assert "lockstep: rank 1 of 2 failed" in done.err
    assert said in done.err


#: Each rank leaves its process id, starts a process of its own, and waits.
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
name = "pid-" + os.environ["RANK"]
with open(name + ".draft", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(name + ".draft", name)
time.sleep(100)
"""


@pytest.mark.wide(beyond=3)
@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_signals_to_the_launcher_leave_no_process(lockstep, start, number, code):
    process = lockstep.start("run", "-n", "2", "--start", start, lockstep.script(SLEEPER))
    pids = " ".join(lockstep.wait_for("pid-0", "pid-1")).split()
    process.send_signal(number)
    done = lockstep.finish(process, 20)
    assert done.code == code
    assert f"lockstep: stopped by {number.name}" in done.err.splitlines()[-1]
    assert "lockstep" not in "".join(done.err.splitlines()[:-1])
    assert all(lockstep.gone(int(pid), 1) for pid in pids)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_launcher_killed_leaves_no_process(lockstep, start):
    process = lockstep.start("run", "-n", "2", "--start", start, lockstep.script(SLEEPER))
    pids = " ".join(lockstep.wait_for("pid-0", "pid-1")).split()
    process.kill()
    lockstep.finish(process, 10)
    assert all(lockstep.gone(int(pid), 3) for pid in pids)


SLOW = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "100"])
with open("pids", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(100)
"""


@pytest.mark.ranks(1)
def test_a_signal_while_shared_packages_are_imported_leaves_no_process(lockstep):
    lockstep.script(SLOW, "site-packages/slow.py")
    path = str(lockstep.directory / "site-packages")
    script = lockstep.script("import slow, lockstep")
    process = lockstep.start("run", script, env={"PYTHONPATH": path})
    pids = lockstep.wait_for("pids")[0].split()
    process.send_signal(signal.SIGINT)
    done = lockstep.finish(process, 10)
    assert (done.code, done.err) == (130, "lockstep: stopped by SIGINT\n")
    assert all(lockstep.gone(int(pid), 1) for pid in pids)


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_worker_that_ignores_sigterm_is_killed(lockstep):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER
    process = lockstep.start("run", "-n", "2", lockstep.script(stubborn))
    pids = " ".join(lockstep.wait_for("pid-0", "pid-1")).split()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two signals at once would be one
    process.send_signal(signal.SIGINT)  # the second is taken as impatience: no grace
    assert lockstep.finish(process, 4).code == 130
    assert all(lockstep.gone(int(pid), 1) for pid in pids)


@pytest.mark.ranks(1)
@pytest.mark.forked
def test_fork_server_killed_is_an_error_and_leaves_no_process(lockstep):
    process = lockstep.start("run", lockstep.script(SLEEPER.replace("os.getpid()", "os.getppid()")))
    server, child = map(int, lockstep.wait_for("pid-0")[0].split())
    os.kill(server, signal.SIGKILL)
    done = lockstep.finish(process, 20)
    os.kill(child, signal.SIGKILL)
    assert done.code == 1
    assert "lockstep: error: the fork server ended" in done.err


@pytest.mark.wide
@pytest.mark.ranks(1)
def test_reader_that_leaves_does_not_stop_the_run(lockstep):
    script = lockstep.script("for i in range(100000): print(i)\nopen('done', 'w').write('1')")
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", script],
        cwd=lockstep.directory,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert os.read(reader, 2) == b"0\n"
    os.close(reader)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    lockstep.wait_for("done")


@pytest.mark.ranks(2)
def test_terminal_is_seen_by_the_main_rank_only(lockstep):
    script = lockstep.script(
        "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size(1).columns"
        " if sys.stdout.isatty() else '')"
    )
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 77))
    subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", "2", "--run-dir", "here", script],
        cwd=lockstep.directory,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        timeout=60,
        check=True,
    )
    os.close(terminal)
    assert os.read(reader, 1000) == b"True True 77\r\n"
    os.close(reader)
    assert (lockstep.directory / "here/logs/rank-1.log").read_text().split() == ["False", "False"]


@pytest.mark.wide
@pytest.mark.ranks(4)
@pytest.mark.forked
def test_two_launches_at_the_same_time(lockstep):
    script = lockstep.script(COLLECTIVE)
    both = [lockstep.start("run", "-n", "2", "-r", "1:3", script) for _ in range(2)]
    assert [lockstep.finish(one).out for one in both] == ["sum 3.0 of 2 []\n"] * 2
    assert len(list(lockstep.directory.glob("runs/train/*"))) == 2


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_fork_server_workers_differ_in_randomness_and_have_their_threads(lockstep):
    script = lockstep.script(
        "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.get_num_threads())"
    )
    done = lockstep("run", "-n", "2", "--tee", "3", "--threads", "3", script)
    first, second = (line.split()[2:] for line in sorted(done.out.splitlines()))
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] == second[2] == "3"


@pytest.mark.wide
@pytest.mark.ranks(1)
def test_what_an_optimizer_imports_is_imported_before_the_fork(lockstep):
    """Otherwise every rank of every generation would take a second for it."""
    script = lockstep.script(
        "import sys; print('torch._dynamo' in sys.modules); from torch import optim"
    )
    assert lockstep("run", script).out == "True\n"


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_a_script_for_one_process_on_several_ranks(lockstep):
    text = "import torch\nloss = torch.ones(1, requires_grad=True)\nloss.backward()\n"
    script = lockstep.script(text)
    told = lockstep("run", "-n", "2", script).err
    assert (
        "train.py seems to make no lockstep.Run and no process group: each of the 2 ranks" in told
    )
    assert "hint: lockstep convert train.py" in told
    assert "warning" not in lockstep("run", "-n", "1", script).err
    grouped = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    script = lockstep.script(grouped + text + "dist.destroy_process_group()\n")
    assert "warning" not in lockstep("run", "-n", "2", script).err
