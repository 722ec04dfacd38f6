"""The device of a rank, with CUDA made up: its real answers are in tests/gpu."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils import deterministic

from lockstep.errors import DeviceError, UsageError
from lockstep.world import World
from lockstep.world.devices import (
    _MALLOC_VARIABLES,
    choose_device,
    default_threads,
    device_identity,
    keep_freed_memory,
    make_deterministic,
)


def world(local_rank: int = 0, local_size: int = 1, environment: str = "torchrun") -> World:
    return World(
        rank=local_rank,
        size=local_size,
        local_rank=local_rank,
        local_size=local_size,
        address="127.0.0.1",
        port=1,
        environment=environment,
    )


@pytest.fixture
def gpus(monkeypatch, cuda):
    """Let torch see a number of GPUs; return the indices that were made the current device."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    def see(count: int) -> list[int]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return chosen

    return see


@pytest.mark.parametrize(
    ("count", "wanted", "where", "environ", "expected"),
    [
        (0, "auto", world(), {}, "cpu"),
        (2, "cpu", world(1, 2), {}, "cpu"),
        (2, "auto", world(1, 2), {}, "cuda:1"),
        (8, "gpu", world(5, 8), {"CUDA_VISIBLE_DEVICES": "0"}, "cuda:5"),
        # Each process sees one GPU of its own, as under Slurm's --gpus-per-task.
        (1, "auto", world(3, 4), {"CUDA_VISIBLE_DEVICES": "0"}, "cuda:0"),
        (1, "gpu", world(3, 4), {"CUDA_VISIBLE_DEVICES": "GPU-12"}, "cuda:0"),
        # A list in the script, or exported without a launcher that reads it.
        (4, "2,3", world(1, 2), {}, "cuda:3"),
        (4, "3", world(), {}, "cuda:3"),
    ],
)
def test_choice(gpus, count, wanted, where, environ, expected):
    current = gpus(count)
    assert choose_device(wanted, where, environ) == torch.device(expected)
    assert current == ([] if expected == "cpu" else [int(expected[-1])])


def test_what_the_launcher_chose_wins(gpus):
    gpus(2)
    told = {
        "LOCKSTEP_DEVICE": "cuda:1",
        "LOCKSTEP_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
    }
    for wanted in ("auto", "cpu", "0,1"):
        chosen = choose_device(wanted, world(0, 2, "lockstep"), told)
        assert chosen == torch.device("cuda:1")
    # Another launcher inside a worker inherits the variables, which are not meant for its ranks.
    assert choose_device("auto", world(0, 2), told) == torch.device("cuda:0")


def test_a_script_that_undoes_the_launchers_choice_is_told(gpus):
    gpus(2)
    told = {
        "LOCKSTEP_DEVICE": "cuda:1",
        "LOCKSTEP_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    with pytest.raises(DeviceError, match="the script set CUDA_VISIBLE_DEVICES to '0,1'"):
        choose_device("auto", world(0, 2, "lockstep"), told)


@pytest.mark.parametrize(
    ("count", "wanted", "where", "environ", "said"),
    [
        (0, "gpu", world(), {}, "1 ranks on this node, which has 0 GPUs"),
        (1, "auto", world(0, 2), {}, "2 ranks on this node, which has 1 GPUs"),
        (2, "auto", world(0, 4), {"CUDA_VISIBLE_DEVICES": "0,1"}, "which has 2 GPUs"),
        (2, "1", world(0, 2), {}, "devices=1 for 2 rank(s) on this node; expected one for each"),
        (2, "1,1", world(0, 2), {}, "devices=1,1 for 2 rank(s)"),
        (2, "1,7", world(1, 2), {}, "there is no GPU 7; this process sees 2"),
        (2, "GPU-12", world(), {}, "GPU-12 is no index, and a process that runs cannot be shown"),
    ],
)
def test_refused_choices(gpus, count, wanted, where, environ, said):
    gpus(count)
    with pytest.raises(DeviceError) as caught:
        choose_device(wanted, where, environ)
    assert said in str(caught.value)


def test_words_that_are_none_are_refused():
    with pytest.raises(UsageError, match="devices is 'tpu'"):
        choose_device("tpu", world(), {})


def test_identity(monkeypatch, cuda):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"u{index}")
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_identity(torch.device("cpu")) is None
    assert device_identity(torch.device("cuda:1")) == "GPU-u1"
    assert device_identity(torch.device("cuda")) == "GPU-u2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    assert device_identity(torch.device("cuda:0")) == "MIG-7"


def test_threads_follow_from_the_nodes_cores(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CORES", "64")
    assert [default_threads(replicas) for replicas in (1, 4, 65)] == [64, 16, 1]
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert default_threads(4) == 16  # bound to one core, a rank still has the run's threads
        monkeypatch.delenv("LOCKSTEP_CORES")
        assert default_threads(1) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_deterministic_algorithms_do_not_fill_new_memory(monkeypatch, cuda):
    for name in ("benchmark", "deterministic"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    try:
        make_deterministic(torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


#: Prints whether memory is kept, and the page faults of a step that frees 160 MB.
STEPS = """
import os, resource, torch
{begin}
def step():
    tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(160)]
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
os._exit(0)
"""
ALONE = """
from lockstep.world.devices import keep_freed_memory
print(keep_freed_memory(torch.device("cpu")))
"""
RUN = """
import lockstep
lockstep.Run("freed", run_dir="run", progress=False).__enter__()
print("GLIBC_TUNABLES" not in os.environ)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def steps_of(directory: Path, begin: str, **environ: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if name not in _MALLOC_VARIABLES}
    ended = subprocess.run(
        [sys.executable, "-c", STEPS.format(begin=begin)],
        check=False,
        env={**clean, **environ},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not ended.returncode, ended.stderr
    kept, faults = ended.stdout.split()
    return kept == "True", int(faults)


@glibc
@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("begin", [RUN, ALONE], ids=["run", "alone"])
def test_a_rank_on_the_cpu_keeps_the_memory_it_frees(tmp_path, begin):
    kept, faults = steps_of(tmp_path, begin)
    assert kept
    # A threshold of 128 KiB gives each of the tensors pages of its own.
    mapped = {"MALLOC_MMAP_THRESHOLD_": "131072", "GLIBC_TUNABLES": ""}
    not_kept, faults_of_each = steps_of(tmp_path, begin, **mapped)
    assert not not_kept
    assert faults < faults_of_each / 10


@glibc
@pytest.mark.parametrize("name", _MALLOC_VARIABLES)
def test_the_allocator_stays_as_the_environment_says(name):
    assert not keep_freed_memory(torch.device("cpu"), {name: ""})


def test_the_allocator_of_host_memory_stays_as_it_is_for_gpus():
    assert not keep_freed_memory(torch.device("cuda"), {})
