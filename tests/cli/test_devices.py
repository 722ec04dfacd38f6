"""`--devices` and `--bind` from the command line, with a made-up nvidia-smi and real processes."""

from __future__ import annotations

import json
import os

import pytest
import torch

from lockstep.world.cores import topology
from tests.conftest import Done, Lockstep
from tests.unit.launch import listings

#: This torch may be built for processors only; the launcher takes its word for that, and asks no more.
BUILT_FOR_GPUS = """
import sys, torch
torch.version.cuda = torch.version.cuda or "13.0"
from lockstep.cli import main
sys.exit(main(sys.argv[1:]))
"""
SHOW = """
import json, os
names = ("RANK", "CUDA_VISIBLE_DEVICES", "LOCKSTEP_DEVICE", "LOCKSTEP_DEVICES")
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump([os.environ.get(name) for name in names], file)
"""


class Server:
    """The command `lockstep` on a machine whose nvidia-smi says what it is told to say."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self.directory = lockstep.directory
        self._tools = self.directory / "tools"
        self._tools.mkdir()

    def has(self, listing: str, code: int = 0) -> None:
        """Let nvidia-smi print `listing` and exit with `code`."""
        (self._tools / "listing").write_text(listing)
        tool = self._tools / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\ntest "$*" = -L || exit 64\ncat "$0/../listing"\nexit {code}\n')
        tool.write_text(tool.read_text().replace("$0/..", str(self._tools)))
        tool.chmod(0o755)

    def __call__(self, *words: str, **environ: str) -> Done:
        path = f"{self._tools}:{os.environ['PATH']}"
        self._lockstep.script(SHOW)
        self._lockstep.script(BUILT_FOR_GPUS, "tools/launcher.py")
        return self._lockstep.python(
            "tools/launcher.py", "run", *words, "train.py", env={"PATH": path, **environ}
        )

    def seen(self, rank: int) -> list[str | None]:
        """Return what rank `rank` found in its environment."""
        found: list[str | None] = json.loads((self.directory / f"rank-{rank}.json").read_text())
        return found


@pytest.fixture
def server(lockstep: Lockstep, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCKSTEP_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    found = Server(lockstep)
    found.has(listings.H100)
    return found


@pytest.mark.wide(beyond=1)
@pytest.mark.forked
@pytest.mark.parametrize("start", ["fork", "spawn", "exec"])
@pytest.mark.ranks(2)
def test_ranks_get_the_gpus_of_the_list(server, start):
    done = server("--devices", "2,3", "--start", start)
    shown = "GPU-0d9ce0d5-22a0-fdf7-c891-f26e86f907b6,GPU-7353c83a-0617-7238-ca5a-9b9c80212c46"
    assert done.code == 0, done.err
    assert done.err.splitlines() == [
        "lockstep: rank 0: cuda:0 = GPU 2, GPU-0d9ce0d5, NVIDIA H100 80GB HBM3",
        "lockstep: rank 1: cuda:1 = GPU 3, GPU-7353c83a, NVIDIA H100 80GB HBM3",
    ]
    assert server.seen(0) == ["0", shown, "cuda:0", "gpu"]
    assert server.seen(1) == ["1", shown, "cuda:1", "gpu"]


@pytest.mark.forked
@pytest.mark.ranks(1)
def test_what_is_hidden_stays_hidden_and_indices_count_the_rest(server):
    done = server("--devices", "1", CUDA_VISIBLE_DEVICES="6,4")
    assert done.code == 0, done.err
    assert "cuda:0 = GPU 4, GPU-b71a1811" in done.err
    assert server.seen(0)[1] == "GPU-b71a1811-5b24-ae65-9a8f-4118c7c1db31"


@pytest.mark.forked
@pytest.mark.ranks(1)
def test_an_exported_list_counts_and_a_flag_wins_over_it(server):
    assert "= GPU 7, GPU-5534d557" in server(LOCKSTEP_DEVICES="7").err
    done = server("--devices", "cpu", LOCKSTEP_DEVICES="7")
    assert (done.code, done.err) == (0, "")
    assert server.seen(0) == ["0", None, None, "cpu"]


@pytest.mark.forked
def test_dry_run_shows_the_mapping(server):
    server.has(listings.A100_WITH_MIG)
    name = "MIG-65b79fff-6d3c-5490-a288-b31ec705f310"
    done = server("--devices", name, "--dry-run")
    assert done.code == 0, done.err
    expected = f"rank 0 on cuda:0 = GPU 0 MIG 1, {name}, MIG 2g.10gb of NVIDIA A100-PCIE-40GB"
    assert expected in done.out.splitlines()
    assert f"  CUDA_VISIBLE_DEVICES={name}" in done.out.splitlines()
    assert not (server.directory / "runs").exists()


@pytest.mark.forked
@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (
            ["--devices", "8"],
            {},
            "--devices: there is no GPU 8; expected one of GPU 0, GPU-c7a0294c",
        ),
        (["--devices", "3"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "hidden by CUDA_VISIBLE_DEVICES=0,1"),
        (["-n", "3", "--devices", "0,1"], {}, "-n is 3 for 2 named GPU(s); expected one rank for"),
        ([], {"LOCKSTEP_DEVICES": "0;1"}, "LOCKSTEP_DEVICES is '0;1'; expected auto, cpu, gpu"),
        (["--devices", "cpu"], {"LOCKSTEP_THREADS": "all"}, "LOCKSTEP_THREADS is 'all'; expected"),
        (["--devices", "cpu"], {"LOCKSTEP_BIND": "tight"}, "LOCKSTEP_BIND is 'tight'; expected"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(server, words, environ, said):
    done = server(*words, **environ)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert sorted(path.name for path in server.directory.iterdir()) == ["tools", "train.py"]


@pytest.mark.forked
def test_a_driver_that_does_not_answer_is_named(server):
    server.has("Failed to initialize NVML: Driver/library version mismatch", code=18)
    done = server("--devices", "0")
    # Then CUDA is asked, in a process of its own; torch on a machine without GPUs sees none.
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    assert done.code == 2
    assert "torch sees none on this machine: nvidia-smi -L failed: Failed to initialize" in done.err


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for GPUs")
@pytest.mark.forked
def test_a_torch_without_cuda_says_so(lockstep):
    done = lockstep("run", "--devices", "0", lockstep.script(""))
    assert done.code == 2
    assert f"sees none on this machine: torch {torch.__version__} is built for" in done.err


AFFINITY = """
import os, pathlib, torch
torch.randn(400, 400) @ torch.randn(400, 400)  # starts the intra-op threads
lists = {line.split()[1] for task in pathlib.Path("/proc/self/task").iterdir()
         for line in (task / "status").read_text().splitlines() if "Cpus_allowed_list" in line}
print(os.environ["RANK"], torch.get_num_threads(), *lists)
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("start", "environ"),
    [("fork", {}), ("spawn", {}), ("exec", {}), ("fork", {"OMP_PROC_BIND": "true"})],
)
@pytest.mark.ranks(2)
def test_bound_ranks_and_their_threads_keep_to_their_cores(lockstep, start, environ):
    cores = [core for node in topology() for core in node]
    if len(cores) < 2:
        pytest.skip("binding two ranks needs two cores")
    script = lockstep.script(AFFINITY)
    words = ("-n", "2", "--bind", "cores", "--threads", "2", "--tee", "3", "--start", start)
    done = lockstep("run", *words, "--devices", "cpu", script, env=environ)
    assert done.code == 0, done.err
    found = dict(line.split("] ")[1].split(maxsplit=1) for line in done.out.splitlines())
    plan = lockstep("run", *words, "--devices", "cpu", "--dry-run", script).out
    shown = [line.split("=")[1] for line in plan.splitlines() if "LOCKSTEP_PROCESSORS" in line]
    assert len(set(shown)) == 2
    assert found == {"0": f"2 {shown[0]}", "1": f"2 {shown[1]}"}


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.ranks(2)
def test_a_launcher_that_openmp_would_tie_leaves_its_ranks_free(lockstep, start):
    script = lockstep.script("import os; print(sorted(os.sched_getaffinity(0)))")
    words = ("-n", "2", "--start", start, "--devices", "cpu")
    done = lockstep("run", *words, script, env={"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"})
    assert done.out == f"{sorted(os.sched_getaffinity(0))}\n", done.err
    note = "lockstep: forked ranks do not read OMP_PROC_BIND, OMP_PLACES; --bind cores gives each"
    assert (note in done.err) is (start == "fork")
