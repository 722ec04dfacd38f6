"""The process: `python -m lockstep.server`, with the variables that the launcher gives it.

With an address as its argument it belongs to the process that started it: it says on its standard output
where it listens, and ends when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict

import torch

from lockstep.server.serve import Server
from lockstep.world import servers
from lockstep.world.environments.lockstep import SERVER, SERVER_ROOT

#: Sent to all processes of a job; workers come to their end by them, and need their servers for it.
_OF_JOBS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Serve until whoever has started it says that it is enough, and the workers have left."""
    index, own = int(os.environ[SERVER]), sys.argv[1:]
    listener, place = servers.open_place(own[0] if own else servers.address_of(os.environ))
    server = Server(listener, servers.token_of(os.environ))
    signal.signal(servers.END, lambda *_: server.end())
    _say(f"server {index}: process {os.getpid()} listens at {place.address} on port {place.port}")
    if own:
        _belong(server, place)
    else:
        servers.publish(os.environ, index, place)
    root = os.environ.get(SERVER_ROOT)
    if root is not None and not sys.flags.safe_path:
        sys.path.insert(0, root)  # as a worker has it: optimizers' classes may be defined there
    if "LOCKSTEP_STALENESS" in os.environ:
        _prepare()
    server.run()
    _say(f"server {index}: {server.traffic}")


def _belong(server: Server, place: servers.Place) -> None:
    """Say where the server listens, and let it end with the process that has started it."""
    for number in _OF_JOBS:
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        sys.stdin.buffer.read()
        server.end()

    threading.Thread(target=wait, name="lockstep-owner", daemon=True).start()
    sys.stdout.write(json.dumps(asdict(place)) + "\n")
    sys.stdout.flush()


def _prepare() -> None:
    """Make an optimizer before one is needed: torch imports its compiler with the first."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def _say(text: str) -> None:
    sys.stderr.write(f"lockstep: {text}\n")


if __name__ == "__main__":
    main()
