"""Read rank, world size and rendezvous of a process that `srun` has started.

Such a process is a task of a Slurm job step. The variables are those of
https://slurm.schedmd.com/srun.html. The script that sbatch runs, and the shells of salloc and `srun --pty`,
have some of these variables too, although each is a single process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world import slurm_nodes
from lockstep.world.environments import init_method
from lockstep.world.environments.variables import integer, master
from lockstep.world.model import World
from lockstep.world.network import LOOPBACK

#: `LOCKSTEP_SLURM=0` ignores Slurm.
SWITCH = "LOCKSTEP_SLURM"
#: The first number of Slurm's batch, interactive and extern steps, which srun does not start.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_HINT = f"start with srun, or set {SWITCH}=0 to ignore Slurm's variables"


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) from Slurm's variables; `None` outside of a job step.

    Raises:
        WorldError: if the step's variables are incomplete or contradict each other.
    """
    step = environ.get("SLURM_STEP_ID", "")
    is_step = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    if environ.get(SWITCH) == "0" or not is_step:
        return None
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    size = integer(environ, name)
    if "SLURM_PTY_PORT" in environ and size <= 1:
        # A shell on a terminal passes the terminal's port on to steps that are started from it, so that
        # only a single task is taken for the shell: as a world it would be a single process anyway.
        return None
    nodes, tasks = _nodes_and_tasks(environ, size)
    node_rank = integer(environ, "SLURM_NODEID")
    if not 0 <= node_rank < len(nodes):
        raise WorldError(
            f"slurm: SLURM_NODEID is {node_rank} in a step of {len(nodes)} node(s)", hint=_HINT
        )
    address, port = master(environ)
    return World(
        rank=integer(environ, "SLURM_PROCID"),
        size=size,
        local_rank=integer(environ, "SLURM_LOCALID"),
        local_size=tasks[node_rank],
        node_rank=node_rank,
        node_count=len(nodes),
        address=address or _main_node(environ, nodes),
        port=port,
        key=_key(environ),
        generation=integer(environ, "SLURM_RESTART_COUNT", default=0),
        environment="slurm",
        reason="SLURM_STEP_ID and SLURM_PROCID are set",
    )


def _nodes_and_tasks(
    environ: Mapping[str, str], size: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of the nodes of a Slurm job step, and the number of tasks on each.

    `size` is the number of tasks of the step.

    Raises:
        WorldError: if the step's variables contradict each other or `size`.
    """
    nodes = slurm_nodes.expand(_text(environ, "SLURM_STEP_NODELIST"))
    tasks = _tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    count = integer(environ, "SLURM_STEP_NUM_NODES", default=len(nodes))
    seen = f"SLURM_STEP_NODELIST is {environ['SLURM_STEP_NODELIST']!r}, {len(nodes)} node(s)"
    if count != len(nodes):
        raise WorldError(f"slurm: {seen}, but SLURM_STEP_NUM_NODES is {count}", hint=_HINT)
    per_node = f"SLURM_STEP_TASKS_PER_NODE is {environ['SLURM_STEP_TASKS_PER_NODE']!r}"
    if len(tasks) != len(nodes):
        raise WorldError(f"slurm: {seen}, but {per_node}, {len(tasks)} node(s)", hint=_HINT)
    if sum(tasks) != size:
        raise WorldError(
            f"slurm: the step has {size} task(s), but {per_node}, {sum(tasks)} task(s)", hint=_HINT
        )
    return nodes, tasks


def _tasks_per_node(text: str) -> tuple[int, ...]:
    """Expand Slurm's list of tasks per node: `2(x3),1` becomes `(2, 2, 2, 1)`."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            raise WorldError(
                f"slurm: SLURM_STEP_TASKS_PER_NODE is {text!r}; expected one such as '2(x3),1'",
                hint=_HINT,
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _main_node(environ: Mapping[str, str], nodes: tuple[str, ...]) -> str:
    """Return the host name of rank 0's node; the loopback address for a job step on a single node.

    `nodes` are the names of the step's nodes, in Slurm's order.

    Raises:
        WorldError: if a host file distributes the tasks, so that rank 0's node is unknown.
    """
    if len(nodes) == 1:
        return LOOPBACK
    by_host_file = environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    if by_host_file and init_method.FILE not in environ:
        raise WorldError(
            "slurm: the tasks are distributed by a host file, and no variable says where rank 0 is",
            hint="set MASTER_ADDR to the first host of that file",
        )
    return nodes[0]


def _key(environ: Mapping[str, str]) -> str:
    cluster = environ.get("SLURM_CLUSTER_NAME", "")
    job = environ.get("SLURM_JOB_ID") or _text(environ, "SLURM_JOBID")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return f"slurm-{cluster}-{job}.{environ['SLURM_STEP_ID']}-{restarts}"


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise WorldError(f"slurm: {name} is not set, though SLURM_STEP_ID is", hint=_HINT)
    return environ[name]
