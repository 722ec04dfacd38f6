"""Several launchers are one launch: on one host, where neither root nor a network is needed."""

from __future__ import annotations

import signal
import time

import pytest

from tests.conftest import Done, Lockstep

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]

WHO = """
import os, sys, time
print("I am", *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
      "GROUP_RANK", "GROUP_WORLD_SIZE")), flush=True)
if len(sys.argv) > 1 and os.environ["RANK"] == sys.argv[1]:
    raise ValueError("bad sample")
if len(sys.argv) > 1:
    time.sleep(60)
"""
STATIC = ("--master-addr", "127.0.0.1")


def both(lockstep: Lockstep, first: tuple[str, ...], second: tuple[str, ...]) -> list[Done]:
    started = [lockstep.start("run", "--nnodes", "2", *words) for words in (first, second)]
    return [lockstep.finish(process) for process in started]


def await_ranks(lockstep: Lockstep) -> None:
    """Wait until both ranks have said who they are."""
    deadline = time.monotonic() + 30
    while len([log for log in lockstep.directory.glob("logs/*/*.log") if log.read_text()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_and_local_ranks_go_on_from_one_launcher_to_the_next(lockstep: Lockstep) -> None:
    lockstep.script(WHO)
    done = both(
        lockstep,
        ("--node-rank", "0", *STATIC, "-n", "2", "--tee", "3", "train.py"),
        ("--node-rank", "1", *STATIC, "-n", "1", "--tee", "3", "train.py"),
    )
    assert [one.code for one in done] == [0, 0], done
    said = sorted(line.partition("I am ")[2] for one in done for line in one.out.splitlines())
    assert said == ["0 3 0 3 0 1", "1 3 1 3 0 1", "2 3 2 3 0 1"]
    assert "3 ranks by 2 launchers: node 0" in done[0].err


def test_one_verdict_for_both(lockstep: Lockstep) -> None:
    lockstep.script(WHO)
    done = both(
        lockstep,
        ("--node-rank", "0", *STATIC, "train.py", "1"),
        ("--node-rank", "1", *STATIC, "train.py", "1"),
    )
    assert [one.code for one in done] == [1, 1]
    for one in done:
        assert "lockstep: rank 1 of 2 failed on" in one.err
        assert "ValueError: bad sample" in one.err


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_longer_than_a_message_is_told_to_both(lockstep: Lockstep, rank: int) -> None:
    """Two million bytes, where a message between launchers has one million at most."""
    bad = f"""
import os, time
if os.environ["RANK"] == "{rank}":
    raise ValueError("bad sample: " + "x" * 2_000_000)
time.sleep(60)
"""
    words = (*STATIC, "--log-dir", "logs", lockstep.script(bad))
    began = time.monotonic()
    done = both(lockstep, ("--node-rank", "0", *words), ("--node-rank", "1", *words))
    for one in done:
        assert (one.code, "was lost" in one.err) == (1, False)
        assert f"lockstep: rank {rank} of 2 failed on" in one.err
        assert "ValueError: bad sample: xxx" in one.err
        assert "characters left out) …" in one.err
    assert time.monotonic() - began < 15, "no launcher waits until it takes the other for lost"
    (log,) = lockstep.directory.glob(f"logs/*/rank-{rank}.log")
    assert "x" * 2_000_000 in log.read_text(), "the log has all of it"


def test_a_mesh_that_does_not_fit_all_launchers_is_refused_before_anything_is_made(
    lockstep: Lockstep,
) -> None:
    words = ("--mesh", "3x1", *STATIC, lockstep.script("import lockstep"))
    done = both(lockstep, ("--node-rank", "0", *words), ("--node-rank", "1", *words))
    for one in done:
        assert (one.code, "Traceback" in one.err) == (2, False)
        assert "a mesh of 3x1 has 3 ranks; the run has 2" in one.err
    assert [path.name for path in lockstep.directory.iterdir()] == ["train.py"]


def test_a_launcher_that_is_stopped_stops_the_other(lockstep: Lockstep) -> None:
    lockstep.script(WHO)
    words = (
        "--log-dir",
        "logs",
        "--rdzv-endpoint",
        f"file://{lockstep.directory}",
        "train.py",
        "9",
    )
    started = [lockstep.start("run", "--nnodes", "2", *words) for _ in range(2)]
    await_ranks(lockstep)
    started[1].send_signal(signal.SIGTERM)
    done = [lockstep.finish(process) for process in started]
    assert [one.code for one in done] == [143, 143]
    assert "stopped by SIGTERM on node" in done[0].err
    assert not list(lockstep.directory.glob("lockstep-*")), "the last to leave removes the file"


@pytest.mark.parametrize("where", [("--node-rank", "0", *STATIC), ("--rdzv-endpoint", "file:///")])
def test_waiting_for_others_can_be_broken_off(lockstep: Lockstep, where: tuple[str, ...]) -> None:
    lockstep.script(WHO)
    where = tuple(word.replace("file:///", f"file://{lockstep.directory}") for word in where)
    process = lockstep.start("run", "--nnodes", "2", *where, "train.py")
    assert process.stderr is not None
    assert "waiting for the other nodes at" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert lockstep.finish(process).code == 130
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("main", [0, 1])
def test_a_launcher_without_a_directory_tells_the_other(lockstep: Lockstep, main: int) -> None:
    lockstep.script(WHO)
    words = [("--node-rank", str(index), *STATIC, "train.py") for index in range(2)]
    words[main] = ("--run-dir", "/proc/none", *words[main])
    done = both(lockstep, words[0], words[1])
    assert "the run directory /proc/none cannot be used" in done[main].err
    assert f"error on node {main} (" in done[1 - main].err
    assert "the run directory /proc/none cannot be used" in done[1 - main].err
    assert 0 not in {one.code for one in done}


def test_who_came_hears_who_did_not(lockstep: Lockstep) -> None:
    lockstep.script(WHO)
    words = ("--nnodes", "3", *STATIC, "--join-timeout", "3", "train.py")
    started = [lockstep.start("run", "--node-rank", str(index), *words) for index in range(2)]
    for process in started:
        done = lockstep.finish(process)
        assert done.code == 2
        assert "1 of 3 nodes did not come within 3 s: node 2; came: " in done.err
        assert "Traceback" not in done.err


def test_two_launchers_with_one_number(lockstep: Lockstep) -> None:
    lockstep.script(WHO)
    words = ("--nnodes", "3", *STATIC, "--join-timeout", "20", "train.py")
    started = [lockstep.start("run", "--node-rank", index, *words) for index in ("0", "1", "1")]
    done = [lockstep.finish(process) for process in started]
    assert [one.code for one in done] == [2, 2, 2], done
    assert all("node 1 has come twice: on " in one.err for one in done)


def test_a_launcher_that_is_killed_is_lost(lockstep: Lockstep) -> None:
    lockstep.script(WHO)
    words = ("--nnodes", "2", *STATIC, "--log-dir", "logs", "train.py", "9")
    started = [lockstep.start("run", "--node-rank", str(index), *words) for index in range(2)]
    await_ranks(lockstep)
    started[1].kill()
    done = lockstep.finish(started[0])
    assert done.code == 1
    assert "node 1" in done.err
    assert "was lost: its launcher has ended, or cannot be reached" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nnodes", "1:"), "--nnodes is '1:'; expected a number of nodes, or MIN:MAX"),
        (("--nnodes", "1:2"), "--nnodes is 1:2, but no rendezvous address is given"),
        (("--nnodes", "3:2", "--rdzv-endpoint", "x"), "expected MIN:MAX with 1 <= MIN <= MAX"),
        (("--nnodes", "2"), "no rendezvous address is given"),
        (("--nnodes", "2", "--node-rank", "2", *STATIC), "--node-rank is 2 with --nnodes 2"),
        (("--nnodes", "2", *STATIC), "--master-addr without --node-rank"),
        (("--master-addr", "192.0.2.1"), "without --nnodes"),
        (("--nnodes", "2", "--rdzv-endpoint", "http://x/y"), "expected HOST, HOST:PORT"),
        (("--nnodes", "2", "--rdzv-endpoint", "file:///no/where"), "does not exist"),
        (
            ("--nnodes", "2", "--node-rank", "1", *STATIC, "--master-port", "99999"),
            "--master-port is 99999",
        ),
        (("--nnodes", "2", "--rdzv-endpoint", "x", "--join-timeout", "0"), "--join-timeout is 0"),
    ],
)
def test_flags_that_say_nothing(lockstep: Lockstep, words: tuple[str, ...], said: str) -> None:
    lockstep.script(WHO)
    done = lockstep("run", *words, "train.py", timeout=20)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
