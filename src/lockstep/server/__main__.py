"""The process: `python -m lockstep.server`, with the variables that the launcher gives it."""

from __future__ import annotations

import os
import signal
import sys

import torch

from lockstep.server.serve import Server
from lockstep.world import servers
from lockstep.world.environments.lockstep import SERVER, SERVER_ROOT


def main() -> None:
    """Serve until the launcher says that it is enough, and the workers have left."""
    index = int(os.environ[SERVER])
    listener, place = servers.open_place(os.environ)
    server = Server(listener, servers.token_of(os.environ))
    signal.signal(servers.END, lambda *_: server.end())
    _say(f"server {index}: process {os.getpid()} listens at {place.address} on port {place.port}")
    servers.publish(os.environ, index, place)
    root = os.environ.get(SERVER_ROOT)
    if root is not None and not sys.flags.safe_path:
        sys.path.insert(0, root)  # as a worker has it: optimizers' classes may be defined there
    if "LOCKSTEP_STALENESS" in os.environ:
        _prepare()
    server.run()
    _say(f"server {index}: {server.traffic}")


def _prepare() -> None:
    """Make an optimizer before one is needed: torch imports its compiler with the first."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def _say(text: str) -> None:
    sys.stderr.write(f"lockstep: {text}\n")


if __name__ == "__main__":
    main()
