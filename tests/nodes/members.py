"""Members of checks, forked from a process that has imported torch: `python -m tests.nodes.members`.

It reads a check per line of its input, starts its members, each on its host, and writes what they
found as a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from lockstep.errors import LockstepError
from lockstep.world.rendezvous.connectivity_check import check_connectivity
from tests.namespaces import enter

_PORT = 20077
_SECONDS = 30


def take_part(member: dict[str, Any], index: int, labels: list[str]) -> dict[str, Any]:
    """Try the others as one member; the store is that of member 0."""
    patience = timedelta(seconds=_SECONDS)
    master = index == 0
    store = TCPStore(
        member["meet_at"], _PORT, is_master=master, wait_for_workers=False, timeout=patience
    )
    arrive(store, "here", index, len(labels))  # as after a rendezvous
    began = time.monotonic()
    try:
        found = check_connectivity(
            PrefixStore("network", store), index=index, labels=labels, interface=member["interface"]
        )
        told = {"found": [[one.name, one.address] for one in found]}
    except LockstepError as error:
        told = {"error": error.message, "kind": type(error).__name__}
    seconds = time.monotonic() - began
    arrive(store, "done", index, len(labels))
    return {**told, "seconds": seconds}


def arrive(store: TCPStore, where: str, index: int, count: int) -> None:
    """Wait for all members; the host of the store, who leaves it last, for their word that they go."""
    store.set(f"{where}/{index}", "")
    store.wait([f"{where}/{other}" for other in range(count)])
    store.set(f"{where}/seen/{index}", "")
    if index == 0:
        store.wait([f"{where}/seen/{other}" for other in range(count)])


def start(member: dict[str, Any], index: int, labels: list[str]) -> tuple[int, int]:
    """Fork a member; return its process id and the descriptor at which it answers."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    signal.alarm(_SECONDS)
    enter(member["namespace"], member["name"])
    os.write(writing, json.dumps(take_part(member, index, labels)).encode())
    os._exit(0)


def main() -> None:
    """Run the checks that are asked for."""
    for line in sys.stdin:
        members = json.loads(line)
        labels = [f"node {number} ({one['name']})" for number, one in enumerate(members)]
        started = [start(one, number, labels) for number, one in enumerate(members)]
        told = []
        for pid, reading in started:
            with os.fdopen(reading) as answer:
                told.append(json.loads(answer.read() or "{}"))
            os.waitpid(pid, 0)
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
