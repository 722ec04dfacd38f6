"""Read rank, world size and rendezvous in a pod of a Volcano job with the plugins `env` and `svc`.

`VC_TASK_HOSTS` has the host names of the pods of a task, for each task of the job, such as
`VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job`; `VK_TASK_INDEX` is the number of this pod in its task.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world.environments import cluster_nodes
from lockstep.world.environments.variables import integer, master
from lockstep.world.model import World

_INDEX = ("VC_TASK_INDEX", "VK_TASK_INDEX")
_HOSTS = re.compile(r"VC_([A-Z0-9_]+)_HOSTS")
#: Tasks whose first pod has rank 0, in jobs with several tasks.
_FIRST = ("MASTER", "LAUNCHER", "CHIEF", "LEADER")


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) of a pod of a Volcano job; `None` elsewhere or for one pod.

    Raises:
        WorldError: if a variable is missing, or this pod is not among those of the job.
    """
    tasks = {found[1]: environ[name] for name in environ if (found := _HOSTS.fullmatch(name))}
    order = sorted(tasks, key=lambda task: (task not in _FIRST, task))
    hosts = [host.strip() for task in order for host in tasks[task].split(",") if host.strip()]
    if len(hosts) < 2:
        return None
    name = next((name for name in _INDEX if name in environ), None)
    if name is None:
        raise WorldError(
            f"volcano: VC_{order[0]}_HOSTS is set, but neither of {' and '.join(_INDEX)}; expected the "
            "number of this pod",
            hint="add the plugin `env` to the job, beside `svc`",
        )
    address, port = master(environ)
    return cluster_nodes.world(
        "volcano",
        node=_number(hosts, tasks, integer(environ, name)),
        count=len(hosts),
        address=address or hosts[0],
        port=port,
        key=f"volcano-{'-'.join(hosts)}",
        names=(name, f"VC_{order[0]}_HOSTS"),
    )


def _number(hosts: list[str], tasks: Mapping[str, str], index: int) -> int:
    """Return the position of this pod in `hosts`, which is its node rank.

    `hosts` are the host names of all pods of the job. `tasks` maps the name of each task (a group of pods)
    to the host names of its pods. If there is one task, the position is `index`, the pod's number in its
    task; otherwise, it is found by host name.
    """
    if len(tasks) == 1:
        return index
    own = socket.gethostname().partition(".")[0]
    names = [host.partition(".")[0] for host in hosts]
    if own not in names:
        raise WorldError(
            f"volcano: this host is {own!r}, and the pods of the job's tasks are {', '.join(names)}; "
            "expected one of them"
        )
    return names.index(own)
