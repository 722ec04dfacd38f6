"""Files in examples/clusters: their commands on two hosts, with what each tool puts in its place."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import string
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.errors import PREEMPTED
from tests.conftest import Lockstep
from tests.hosts import Host, Hosts

EXAMPLES = Path(__file__).parents[2] / "examples"
CLUSTERS = EXAMPLES / "clusters"

#: Host number, all hosts and the shared directory, to a command of a shell, and its variables.
Command = Callable[[int, list[Host], Path], tuple[str, dict[str, str]]]


def skypilot(number: int, made: list[Host], _: Path) -> tuple[str, dict[str, str]]:
    """SkyPilot starts `run` on each node, with these variables."""
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    assert task["num_nodes"] == len(made)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PREEMPTED]
    return task["run"], {
        "SKYPILOT_NODE_RANK": str(number),
        "SKYPILOT_NODE_IPS": "\n".join(str(host.address) for host in made),
        "SKYPILOT_NUM_NODES": str(len(made)),
        "SKYPILOT_TASK_ID": "sky-1",
    }


def compose(number: int, made: list[Host], _: Path) -> tuple[str, dict[str, str]]:
    """Docker Compose puts variables of the shell into the command, and starts it without a shell."""
    text = (CLUSTERS / "compose.yaml").read_text()
    given = {"NODE_RANK": str(number), "MASTER_ADDR": made[0].name}
    (service,) = yaml.safe_load(text)["services"].values()
    words = [re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: given[m[1]], w) for w in service["command"]]
    return shlex.join(words), {}


def torchx(number: int, made: list[Host], shared: Path) -> tuple[str, dict[str, str]]:
    """Of the package torchx, the component needs these classes; it names host 0 by a variable."""
    specs: Any = types.ModuleType("torchx.specs")
    specs.macros = types.SimpleNamespace(replica_id="${replica_id}", rank0_env="${rank0_env}")
    specs.Role = specs.AppDef = types.SimpleNamespace
    package: Any = types.ModuleType("torchx")
    package.specs = specs
    found = importlib.util.spec_from_file_location(
        "lockstep_torchx", CLUSTERS / "torchx_lockstep.py"
    )
    assert found is not None
    assert found.loader is not None
    component = importlib.util.module_from_spec(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchx", package)
        found.loader.exec_module(component)
    run_dir = str(shared / "runs/digits")
    app = component.train("examples/digits.py", nodes=2, ranks=2, run_dir=run_dir)
    (role,) = app.roles
    assert role.num_replicas == len(made)
    values = {"replica_id": number, "rank0_env": "TORCHX_RANK0_HOST"}
    words = [string.Template(word).safe_substitute(values) for word in role.args]
    return shlex.join([role.entrypoint, *words]), {"TORCHX_RANK0_HOST": made[0].name}


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("of", [skypilot, compose, torchx])
def test_two_hosts_train_as_one(of: Command, hosts: Hosts, lockstep: Lockstep) -> None:
    shared = lockstep.directory
    (shared / "examples").symlink_to(EXAMPLES)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made, started = hosts.lan(2), []
    for number, host in enumerate(made):
        command, own = of(number, made, shared)
        command = f"{command.strip().replace('/shared', str(shared))} --epochs 1"
        started.append(host.start("bash", "-ec", command, env=path | own, cwd=shared))
    done = hosts.finish(started, timeout=120)
    alone = lockstep("run", "examples/digits.py", "--epochs", "1", timeout=120)
    told = [re.findall(r"digest=(sha256:\w{64})", text) for text in (done[0].out, alone.out)]
    assert told[0] == told[1] != []
    assert (shared / "runs/digits/run.json").exists()
