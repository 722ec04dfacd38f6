"""Starts a lighthouse of torchft and replica groups of one process each; starts them again for ever.

Its own documentation leaves the groups to torchrun, one for each, or to a scheduler. Here a group
starts again within 10 ms, which is faster. The lighthouse is set as that documentation has it, except
that the dead are noticed after one second and not five.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from torchft.coordination import LighthouseServer

SCRIPT = Path(__file__).parent / "killed_torchft.py"


def main() -> None:
    count, words = int(sys.argv[1]), sys.argv[2:]
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=1000,
    )
    # The address that it gives names this host, which need not resolve.
    port = lighthouse.address().rpartition(":")[2]
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    env["NUM_REPLICA_GROUPS"] = str(count)
    groups: dict[int, subprocess.Popen[bytes]] = {}
    while True:
        for group in range(count):
            if group not in groups or groups[group].poll() is not None:
                groups[group] = subprocess.Popen(
                    [sys.executable, str(SCRIPT), *words],
                    env={**env, "REPLICA_GROUP_ID": str(group)},
                )
        time.sleep(0.01)


if __name__ == "__main__":
    main()
