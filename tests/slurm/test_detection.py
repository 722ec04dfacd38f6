"""Who a process is under a real Slurm."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

from lockstep.world import slurm_nodes
from tests.conftest import Lockstep
from tests.slurm.conftest import WHO, Slurm


def test_a_step_of_two_nodes(slurm: Slurm) -> None:
    worlds = slurm.who("-N2", "-n4")
    assert [world["rank"] for world in worlds] == [0, 1, 2, 3]
    places = {(world["local_size"], world["node_rank"]) for world in worlds}
    assert sorted(places) in ([(1, 1), (3, 0)], [(2, 0), (2, 1)])
    for world in worlds:
        assert (world["environment"], world["size"], world["node_count"]) == ("slurm", 4, 2)
        assert (world["address"], world["port"]) == ("n1", None)
        assert world["key"] == worlds[0]["key"]


def test_two_steps_have_two_keys(slurm: Slurm) -> None:
    (one,), (other,) = slurm.who("-n1"), slurm.who("-n1")
    assert one["address"] == "127.0.0.1"
    assert one["key"] != other["key"]


def test_slurm_can_be_switched_off(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SLURM", "0")
    assert [world["environment"] for world in slurm.who("-n2")] == ["single"] * 2


def test_variables_of_pmi_change_nothing(slurm: Slurm) -> None:
    worlds = slurm.who("-n2", "--mpi=pmi2")
    assert [(world["environment"], world["rank"]) for world in worlds] == [
        ("slurm", 0),
        ("slurm", 1),
    ]


def test_the_batch_script_is_no_step_but_its_steps_are(slurm: Slurm, lockstep: Lockstep) -> None:
    lockstep.script(WHO, "who.py")
    who = f"{sys.executable} who.py"
    lockstep.script(f"#!/bin/sh\n{who}\nsrun {who}\necho done > ended\n", "job.sh")
    assert slurm("sbatch", "-n2", "--output=out", "job.sh").code == 0
    lockstep.wait_for("ended")
    told = slurm.directory.joinpath("out").read_text().splitlines()
    worlds = [json.loads(line) for line in told]
    assert [(world["environment"], world["size"]) for world in worlds] == [
        ("single", 1),
        ("slurm", 2),
        ("slurm", 2),
    ]


def test_the_command_of_salloc_is_no_step(slurm: Slurm) -> None:
    slurm.directory.joinpath("who.py").write_text(WHO)
    done = slurm("salloc", "-n2", sys.executable, "who.py")
    assert json.loads(done.out)["environment"] == "single"


def test_torchrun_inside_a_step_wins(slurm: Slurm) -> None:
    slurm.directory.joinpath("who.py").write_text(WHO)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = slurm("srun", "-n1", *torchrun, "--nproc-per-node=2", "who.py")
    worlds = [json.loads(line) for line in done.out.splitlines()]
    assert sorted((world["environment"], world["rank"]) for world in worlds) == [
        ("torchrun", 0),
        ("torchrun", 1),
    ]


def test_slurm_knows_the_addresses_of_its_nodes(slurm: Slurm) -> None:
    assert slurm_nodes.address("n2") == "127.0.0.1"
    assert slurm_nodes.address("n3") is None


@pytest.mark.parametrize(
    "text", ["n1", "n[5,1-2]", "n[1-2,5],m[01-03],c", "rack[0-1]-[2,4]", "n[0-1][0-1]", "n[1,01]"]
)
def test_lists_of_nodes_mean_what_slurm_means(slurm: Slurm, text: str) -> None:
    expected = slurm("scontrol", "show", "hostnames", text).out.split()
    assert list(slurm_nodes.expand(text)) == expected


def test_a_shell_on_a_terminal_is_no_step_but_what_it_starts_is(slurm: Slurm) -> None:
    if shutil.which("script") is None:
        pytest.skip("needs a terminal: script is not installed")
    slurm.directory.joinpath("who.py").write_text(WHO)
    who = f"{sys.executable} who.py"
    # A terminal that is not connected yet loses what is written to it.
    inside = f"sh -c 'sleep 1; {who}; srun --overlap -n2 -c1 {who}'"
    done = slurm("script", "-qec", f"srun -n1 -c2 --pty {inside}", "/dev/null")
    worlds = [json.loads(found) for found in re.findall(r"\{.*\}", done.out)]
    assert worlds, done.out
    assert sorted((world["environment"], world["size"]) for world in worlds) == [
        ("single", 1),
        ("slurm", 2),
        ("slurm", 2),
    ]
