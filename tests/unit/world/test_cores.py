"""Cores: by affinity, by the quotas of cgroups in made-up trees, and by a real quota."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.world import World, cores
from lockstep.world.cgroups import cpu_quota, memory_left, oom_kills
from lockstep.world.cores import (
    CpuShare,
    count,
    parse_list,
    shared_cores,
    show_list,
    topology,
    usable_cores,
)
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous


def process(directory: Path, cgroup: str, mounts: str) -> Path:
    """Make up a process's directory in /proc whose cgroups are mounted below `directory`."""
    proc = directory / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mounts.replace("AT", str(directory).replace(" ", "\\040")))
    return proc


def group(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text + "\n")


V2 = "30 23 0:26 / AT/fs rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 / AT/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / AT/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)


@pytest.mark.parametrize(
    ("own", "above", "root", "expected"),
    [
        ("150000 100000", "max 100000", None, 1.5),
        ("max 100000", "200000 100000", None, 2.0),
        ("400000 100000", "max 100000", "300000 100000", 3.0),
    ],
)
def test_version_2_takes_the_smallest_on_the_way(tmp_path, own, above, root, expected):
    group(tmp_path / "fs/jobs/one", cpu__max=own)
    group(tmp_path / "fs/jobs", cpu__max=above)
    group(tmp_path / "fs", **({"cpu__max": root} if root else {}))
    assert cpu_quota(process(tmp_path, "0::/jobs/one\n", V2)) == expected


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [("-1", "-1", None), ("150000", "120000", 1.2)],
)
def test_version_1_takes_the_smallest_on_the_way(tmp_path, own, above, expected):
    group(tmp_path / "cpu/docker/ab", cpu__cfs_quota_us=own, cpu__cfs_period_us="100000")
    group(tmp_path / "cpu/docker", cpu__cfs_quota_us=above, cpu__cfs_period_us="100000")
    group(tmp_path / "memory/other", cpu__cfs_quota_us="1", cpu__cfs_period_us="100000")
    text = "12:memory:/other\n4:cpu,cpuacct:/docker/ab\n1:name=systemd:/\n0::/\n"
    assert cpu_quota(process(tmp_path, text, V1)) == expected


@pytest.mark.parametrize(
    ("mounted", "own"),
    [
        ("/docker/ab", "/docker/ab"),  # the container's group is what is mounted
        ("/", "/"),  # the container has a namespace of its own
        ("/", "/../../elsewhere"),  # and the process is in a group outside of it
        ("/docker/ab", "/docker/abc"),
    ],
)
def test_a_container_sees_its_own_group(tmp_path, mounted, own):
    group(tmp_path / "fs", cpu__max="250000 100000")
    mounts = V2.replace(" / AT", f" {mounted} AT")
    assert cpu_quota(process(tmp_path, f"0::{own}\n", mounts)) == 2.5


def test_blanks_in_paths(tmp_path):
    directory = tmp_path / "a b"
    directory.mkdir()
    group(directory / "fs", cpu__max="250000 100000")
    assert cpu_quota(process(directory, "0::/\n", V2)) == 2.5


def test_memory_that_the_groups_leave(tmp_path):
    group(tmp_path / "fs/jobs", memory__max="1000", memory__current="700")
    group(tmp_path / "fs", memory__max="max", memory__current="900")
    group(tmp_path / "fs/jobs/one")
    proc = process(tmp_path, "0::/jobs/one\n", V2)
    assert memory_left(proc) == 300
    (tmp_path / "fs/jobs/memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert memory_left(proc) == 350
    group(tmp_path / "fs/jobs/one", memory__max="100", memory__current="150")
    assert memory_left(proc) == 0


def test_memory_that_groups_of_version_1_leave(tmp_path):
    huge = str(2**63 - 4096)
    group(tmp_path / "m", memory__limit_in_bytes=huge, memory__usage_in_bytes="1")
    group(tmp_path / "m/ab", memory__limit_in_bytes="5000", memory__usage_in_bytes="1000")
    mounts = "33 31 0:29 / AT/m rw,relatime - cgroup cgroup rw,memory\n"
    assert memory_left(process(tmp_path, "12:memory:/ab\n4:cpu:/x\n", mounts)) == 4000


MEMORY = "33 31 0:29 / AT/m rw,relatime - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "kills"),
    [
        ("0::/jobs/one\n", V2, {"fs/jobs/one": "low 0\noom 3\noom_kill 2"}, 2),
        ("0::/jobs/one/leaf\n", V2, {"fs/jobs/one/leaf": "", "fs/jobs/one": "oom_kill 2"}, 2),
        ("0::/jobs/one\n", V2, {"fs/jobs/one": "oom 1"}, None),  # an old kernel
        ("4:memory:/ab\n", MEMORY, {"m/ab": "under_oom 0\noom_kill 5"}, 5),
        ("4:memory:/ab\n0::/ab\n", MEMORY + V2, {"m/ab": "oom_kill 5", "fs/ab": "oom_kill 2"}, 5),
        ("3:cpu:/x\n", MEMORY, {"m/x": "oom_kill 5"}, None),
    ],
)
def test_kills_for_memory(tmp_path, groups, mounts, files, kills):
    for path, text in files.items():
        name = "memory__events" if path.startswith("fs") else "memory__oom_control"
        group(tmp_path / path, **({name: text} if text else {}))
    (tmp_path / "fs").mkdir(exist_ok=True)
    assert oom_kills(process(tmp_path, groups, mounts)) == kills


def test_without_cgroups_nothing_is_limited(tmp_path):
    assert memory_left(tmp_path) is None
    assert cpu_quota(tmp_path) is None
    assert cpu_quota(process(tmp_path, "0::/\n", "")) is None


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([CpuShare(cores=(0, 1, 2, 3))], 4),
        ([CpuShare(cores=(0, 1, 2, 3), quota=1.9)], 1),
        ([CpuShare(cores=(0, 1, 2, 3), quota=0.5)], 1),
        ([CpuShare(cores=(0, 1), quota=8.0)], 2),
        ([CpuShare(cores=(0, 1)), CpuShare(cores=(2, 3))], 4),
        ([CpuShare(cores=(0,), quota=1.0), CpuShare(cores=(1,))], 2),
    ],
)
def test_count(shares, expected):
    assert count(shares) == expected


def test_ranks_of_a_node_share_their_cores(monkeypatch):
    """Ranks 0 and 2 are on the main rank's node, each bound to two of its cores."""
    import torch.distributed as dist

    store, here = dist.HashStore(), threading.local()
    monkeypatch.setattr(CpuShare, "here", lambda: here.share)

    def rank(number: int) -> int:
        here.share = CpuShare(cores=(2 * number, 2 * number + 1))
        world = World(
            rank=number,
            size=3,
            local_rank=number // 2,
            local_size=1 if number == 1 else 2,
            node_rank=number % 2,
            node_count=2,
            address="127.0.0.1",
            port=1,
        )
        rendezvous = RankRendezvous(world=world, store=store, number=0, ours=True)
        return shared_cores(rendezvous)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, (2, 1, 0), timeout=30)) == [4, 4, 4]


def test_affinity_counts():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
        assert topology() == (((min(before),),),)
    finally:
        os.sched_setaffinity(0, before)


def test_hardware_threads_of_a_core_count_once(tmp_path, monkeypatch):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        group(tmp_path / f"cpu/cpu{cpu}/topology", core_cpus_list=siblings)
        (tmp_path / f"cpu/cpu{cpu}/node{cpu % 2}").mkdir()
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert topology() == (((0, 2),), ((1, 3),))
    assert topology({1, 2}) == (((2,),), ((1,),))
    assert CpuShare.here().cores == (0, 1)


def test_processors_that_nothing_is_said_about_are_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path)
    assert topology({4, 1}) == (((1,), (4,)),)


@pytest.mark.parametrize(
    ("text", "cpus"), [("", []), ("3", [3]), ("0-2,8,10-11", [0, 1, 2, 8, 10, 11])]
)
def test_lists(text, cpus):
    assert parse_list(text + "\n") == cpus
    assert show_list(cpus) == text


def _cpu_hierarchy() -> Path | None:
    """Return the directory in which groups with a quota can be made, if there is one."""
    for candidate in map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")):
        if (candidate / "cgroup.procs").exists():
            return candidate
    unified = Path("/sys/fs/cgroup")
    control = unified / "cgroup.subtree_control"
    return unified if control.exists() and "cpu" in control.read_text().split() else None


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A cgroup of the kernel's inside another one; both are removed at the end."""
    hierarchy = _cpu_hierarchy()
    if os.geteuid() != 0 or hierarchy is None:
        pytest.skip("making a cgroup with a quota needs root and the cpu controller")
    outer = hierarchy / f"lockstep-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        outer.mkdir()
        if (outer / "cgroup.subtree_control").exists():
            (outer / "cgroup.subtree_control").write_text("+cpu")
        inner.mkdir()
    except OSError as error:
        pytest.skip(f"making a cgroup is not allowed here: {error.strerror}")
    yield inner
    for made in (inner, outer):
        with contextlib.suppress(FileNotFoundError):
            made.rmdir()


def _limit(made: Path, quota: int) -> None:
    if (made / "cpu.max").exists():
        (made / "cpu.max").write_text(f"{quota} 100000")
    else:
        (made / "cpu.cfs_quota_us").write_text(str(quota))


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [(150_000, None, "1 1.5"), (200_000, 200_000, "2 2.0")],
)
def test_a_real_quota(real_group, outer, inner, expected):
    if len(topology()[0]) < 2:
        pytest.skip("this machine has one core, which no quota makes fewer")
    _limit(real_group.parent, outer)
    if inner is not None:
        _limit(real_group, inner)
    code = (
        f"open('{real_group}/cgroup.procs', 'w').write('0')\n"
        "from lockstep.world import cgroups, cores\n"
        "print(cores.usable_cores(), cgroups.cpu_quota())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == expected, done.stderr
