"""Server process: `python -m lockstep.engine.parameter_server`, with variables of the launcher.

With an address as its argument it belongs to the process that started it: it prints its address to standard
output, and ends when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict

import torch

from lockstep.engine.parameter_server import discovery
from lockstep.engine.parameter_server.event_loop import Server
from lockstep.world.environments.lockstep import END_SERVER, SERVER, SERVER_ROOT

#: Sent to all processes of a job; workers come to their end by them, and need their servers for it.
_OF_JOBS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Serve until the launcher, or the parent process, ends it, and the workers have left."""
    index, own = int(os.environ[SERVER]), sys.argv[1:]
    listener, place = discovery.listen(own[0] if own else discovery.launch_address(os.environ)[0])
    server = Server(listener, discovery.token_of(os.environ))
    signal.signal(END_SERVER, lambda *_: server.end())
    _say(f"server {index}: process {os.getpid()} listens at {place.address} on port {place.port}")
    if own:
        for number in _OF_JOBS:
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_await_parent, args=(server,), daemon=True).start()
        sys.stdout.write(json.dumps(asdict(place)) + "\n")
        sys.stdout.flush()
    else:
        discovery.publish(os.environ, index, place)
    root = os.environ.get(SERVER_ROOT)
    if root is not None and not sys.flags.safe_path:
        sys.path.insert(0, root)  # as a worker has it: optimizers' classes may be defined there
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
