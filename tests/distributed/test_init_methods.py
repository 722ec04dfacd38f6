"""Every init method of torch.distributed, and the roll call that comes with each (A7)."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.conftest import Done, Lockstep
from tests.distributed.small import SCRIPT, digest_of

pytestmark = [pytest.mark.forked, pytest.mark.ranks(3)]


def start_all(lockstep: Lockstep, ranks: list[dict[str, str]], *words: str) -> list[Done]:
    """Start one process for each environment in `ranks`, and wait for all."""
    words = words or ("train.py",)
    started = [lockstep.start(*words, env=env, program=()) for env in ranks]
    return [lockstep.finish(process) for process in started]


def same_everywhere(done: list[Done], expected: str) -> None:
    assert [one.code for one in done] == [0] * len(done), "\n".join(one.err for one in done)
    assert digest_of("".join(one.out for one in done)) == expected


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_tcp(lockstep: Lockstep, expected: str) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [{"LOCKSTEP_INIT_METHOD": f"{url}?rank={rank}&world_size=3"} for rank in range(3)]
    same_everywhere(start_all(lockstep, ranks), expected)


def test_file(lockstep: Lockstep, expected: str) -> None:
    file = lockstep.directory / "rendezvous"
    ranks = [
        {"LOCKSTEP_INIT_METHOD": f"file://{file}", "RANK": str(rank), "WORLD_SIZE": "2"}
        for rank in range(2)
    ]
    same_everywhere(start_all(lockstep, ranks), expected)
    assert not file.exists(), "the main rank removes it at the end"


def test_env_without_local_numbers(lockstep: Lockstep, expected: str) -> None:
    rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    show = "print('place', w.local_rank, w.local_size, w.node_rank, w.node_count, w.placed)"
    begin = "replicas=4) as run:"
    lockstep.script(SCRIPT.replace(begin, f"{begin}\n        w = run.world; {show}"))
    done = start_all(lockstep, [{**rendezvous, "RANK": str(rank)} for rank in range(2)])
    same_everywhere(done, expected)
    assert [line for one in done for line in one.out.splitlines() if line.startswith("place")] == [
        "place 0 2 0 1 True",
        "place 1 2 0 1 True",
    ]


GIVEN = """
import sys
import torch.distributed as dist
import lockstep

rank, how, place = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if how == "store":
    host, port = place.split(":")
    store = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)
    arguments = {"store": store}
else:
    arguments = {"init_method": place}
original = lockstep.Run
lockstep.Run = lambda *a, **k: original(*a, rank=rank, world_size=2, **arguments, **k)
import train
train.main()
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("how", ["store", "tcp", "file"])
def test_the_script_says_where(lockstep: Lockstep, expected: str, how: str) -> None:
    lockstep.script(GIVEN, "given.py")
    port = free_port()
    place = {
        "store": f"127.0.0.1:{port}",
        "tcp": f"tcp://127.0.0.1:{port}",
        "file": f"file://{lockstep.directory}/rendezvous",
    }[how]
    started = [lockstep.start("given.py", str(rank), how, place, program=()) for rank in range(2)]
    same_everywhere([lockstep.finish(process) for process in started], expected)


def test_a_group_made_with_numbers_of_its_own(lockstep: Lockstep, expected: str) -> None:
    lockstep.script(
        """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
import train
train.main()
dist.destroy_process_group()
""",
        "own.py",
    )
    url = f"tcp://127.0.0.1:{free_port()}"
    started = [lockstep.start("own.py", str(rank), url, program=()) for rank in range(2)]
    same_everywhere([lockstep.finish(process) for process in started], expected)


#: As a group of NCCL alone, which moves nothing that is in the processor's memory.
ONE_SIDED = """
import sys
import torch.distributed as dist
dist.init_process_group("cuda:gloo", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
import train
train.main()
dist.destroy_process_group()
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("strategy", ["pipeline", "fsdp"])
def test_a_group_without_a_side_for_the_cpu(lockstep: Lockstep, strategy: str) -> None:
    ends = "                optimizer.zero_grad()\n"
    rows = "x[:, 0] for x, _ in run.loader(data, batch_size=8)"
    show = f"            print('rows', float(run.gather({rows}).sum()))\n"
    lockstep.script(SCRIPT.replace(ends, ends + show))
    lockstep.script(ONE_SIDED, "own.py")
    alone = lockstep.finish(lockstep.start("train.py", program=()))
    url = f"tcp://127.0.0.1:{free_port()}"
    asked = {"LOCKSTEP_STRATEGY": strategy}
    if strategy == "pipeline":
        asked["LOCKSTEP_MESH"] = "1x2"
    started = [lockstep.start("own.py", str(rank), url, env=asked, program=()) for rank in range(2)]
    done = [lockstep.finish(process) for process in started]
    same_everywhere(done, digest_of(alone.out))
    told = [line for line in alone.out.splitlines() if line.startswith("rows")]
    assert len(told) == 2
    assert [one for one in done[0].out.splitlines() if one.startswith("rows")] == told


@pytest.mark.wide
def test_several_runs_of_one_process_meet_each_time(lockstep: Lockstep, expected: str) -> None:
    lockstep.script("import train\nfor _ in range(3):\n    train.main()\n", "thrice.py")
    file = lockstep.directory / "rendezvous"
    ranks = [
        {"LOCKSTEP_INIT_METHOD": f"file://{file}?rank={rank}&world_size=2"} for rank in range(2)
    ]
    done = start_all(lockstep, ranks, "thrice.py")
    assert "".join(one.out for one in done).count(expected) == 3
    assert not list(Path(lockstep.directory).glob("rendezvous*"))


# --- what does not fit together ------------------------------------------------------------------


def refused(done: list[Done], said: str) -> None:
    assert all(one.code != 0 for one in done)
    for one in done:
        assert "Traceback" not in one.err, one.err
    assert any(said in one.err for one in done), "\n".join(one.err for one in done)


def test_a_stale_file(lockstep: Lockstep, expected: str) -> None:
    file = lockstep.directory / "rendezvous"
    url = f"file://{file}"
    killed = lockstep.start(
        "train.py", env={"LOCKSTEP_INIT_METHOD": f"{url}?rank=0&world_size=2"}, program=()
    )
    while b"members/0" not in (file.read_bytes() if file.exists() else b""):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    lockstep.finish(killed)
    ranks = [{"LOCKSTEP_INIT_METHOD": f"{url}?rank={rank}&world_size=2"} for rank in range(2)]
    refused(start_all(lockstep, ranks), "rank 0 has come twice")


def test_a_rank_that_never_comes_is_named(lockstep: Lockstep, expected: str) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        {
            "LOCKSTEP_INIT_METHOD": f"{url}?rank={rank}&world_size=3",
            "LOCKSTEP_JOIN_TIMEOUT": "4",
        }
        for rank in range(2)
    ]
    done = start_all(lockstep, ranks)
    refused(done, "1 of 3 ranks did not come within 4 s: rank 2")


def test_worlds_of_different_sizes(lockstep: Lockstep, expected: str) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        {"LOCKSTEP_INIT_METHOD": f"{url}?rank=0&world_size=2"},
        {"LOCKSTEP_INIT_METHOD": f"{url}?rank=1&world_size=3"},
    ]
    refused(start_all(lockstep, ranks), "is in a world of 3, rank 0 on")


def test_two_ranks_that_claim_one_place(lockstep: Lockstep, expected: str) -> None:
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
    }
    done = start_all(lockstep, [{**shared, "RANK": str(rank)} for rank in range(2)])
    refused(done, "ranks 0 and 1 are both local rank 0 of node 0")


NEWER = """
import lockstep.world.host
lockstep.world.host.__version__ = "9.9"
import train
train.main()
"""


def test_other_versions_on_another_node(lockstep: Lockstep, expected: str) -> None:
    lockstep.script(
        "import lockstep.world.host\nlockstep.world.host.__version__ = '9.9'\nimport train\ntrain.main()\n",
        "newer.py",
    )
    url = f"tcp://127.0.0.1:{free_port()}"
    envs = [{"LOCKSTEP_INIT_METHOD": f"{url}?rank={rank}&world_size=2"} for rank in range(2)]
    started = [
        lockstep.start(script, env=env, program=())
        for script, env in zip(("train.py", "newer.py"), envs, strict=True)
    ]
    refused([lockstep.finish(process) for process in started], "has lockstep 9.9, rank 0 on")


def test_a_port_that_is_taken(lockstep: Lockstep, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        url = f"tcp://127.0.0.1:{port}?rank=0&world_size=2"
        refused(start_all(lockstep, [{"LOCKSTEP_INIT_METHOD": url}]), f"port {port}")


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("udp://127.0.0.1:1", "expected tcp://, file:// or env://"),
        ("tcp://127.0.0.1", "expected a host and a port"),
        ("file://rendezvous", "the absolute path of a file"),
        ("tcp://127.0.0.1:1?rank=0&color=red", "asks for color"),
        ("file:///nowhere/at/all?rank=0&world_size=2", "does not exist"),
        ("tcp://127.0.0.1:29500", "there is no rank for this process"),
    ],
)
def test_init_methods_that_are_none(lockstep: Lockstep, url: str, said: str) -> None:
    lockstep.script(SCRIPT)
    refused(start_all(lockstep, [{"LOCKSTEP_INIT_METHOD": url}]), said)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("when", ["before any step", "after the last step", "with the device"])
def test_a_rank_that_fails_outside_of_collectives_is_told(
    lockstep: Lockstep, expected: str, when: str
) -> None:
    begin, end = "replicas=4) as run:", "optimizer.zero_grad()\n"
    fails = "if run.world.rank == 1: raise ValueError('bad sample')"
    if when == "before any step":
        lockstep.script(SCRIPT.replace(begin, f"{begin}\n        {fails}"))
    elif when == "after the last step":
        lockstep.script(SCRIPT.replace(end, f"{end}        {fails}\n"))
    url = f"tcp://127.0.0.1:{free_port()}"
    ranks = [{"LOCKSTEP_INIT_METHOD": f"{url}?rank={rank}&world_size=2"} for rank in range(2)]
    if when == "with the device":
        ranks[1]["LOCKSTEP_DEVICES"] = "gpu"
    done = start_all(lockstep, ranks)
    assert 0 not in {one.code for one in done}
    assert "rank 1 failed: " in done[0].err
    assert ("bad sample" if when != "with the device" else "GPU") in done[0].err
