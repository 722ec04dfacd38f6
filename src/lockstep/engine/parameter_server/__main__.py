"""Process of a parameter server: `python -m lockstep.engine.parameter_server [ADDRESS]`.

A launcher starts the server without the argument; the server writes its address to the launch's store.
Rank 0 starts it with the argument; the server prints its address, and ends when standard input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import torch

from lockstep.engine.parameter_server import discovery
from lockstep.engine.parameter_server.event_loop import Server
from lockstep.world.environments.torchrun import END_SERVER, SERVER, SERVER_ROOT

#: Signals to all processes of a job. The server ignores them, since workers need it while they end.
_OF_JOBS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Run the server until the launcher or rank 0 ends it, and all workers have disconnected."""
    index, own = int(os.environ[SERVER]), sys.argv[1:]
    listener, place = discovery.listen(own[0] if own else discovery.launch_address(os.environ)[0])
    server = Server(listener, discovery.token_of(os.environ))
    signal.signal(END_SERVER, lambda *_: server.end())
    _say(f"server {index}: process {os.getpid()} listens at {place[0]} on port {place[1]}")
    if own:
        for number in _OF_JOBS:
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_await_parent, args=(server,), daemon=True).start()
        sys.stdout.write(json.dumps(place) + "\n")
        sys.stdout.flush()
    else:
        discovery.publish(os.environ, index, place)
    root = os.environ.get(SERVER_ROOT)
    if root is not None and not sys.flags.safe_path:
        sys.path.insert(0, root)  # as in a worker: classes of optimizers may be defined there
    if "LOCKSTEP_STALENESS" in os.environ:  # torch imports its compiler with the first optimizer
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    server.run()
    _say(f"server {index}: {server.traffic}")


def _await_parent(server: Server) -> None:
    sys.stdin.buffer.read()  # until it closes the pipe, or dies
    server.end()


def _say(text: str) -> None:
    sys.stderr.write(f"lockstep: {text}\n")


if __name__ == "__main__":
    main()
