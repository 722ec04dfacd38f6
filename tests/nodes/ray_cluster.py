"""A Ray cluster of two nodes on this machine: prints its address, and ends with its standard input."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    # Ray Train's controller and the others of its own take no CPU of the workers.
    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
