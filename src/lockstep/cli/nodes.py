"""Flags of several nodes, for the verbs that are started on each of them."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser, *, elastic: bool) -> None:
    """Add the flags for the number of nodes and their rendezvous.

    Args:
        parser: of the verb.
        elastic: whether nodes may come and go.
    """
    group = parser.add_argument_group(
        "several nodes",
        "Under Slurm and mpiexec the nodes find each other without these flags.",
    )
    group.add_argument(
        "--nnodes",
        metavar="NODES",
        help="number of nodes, on each of which this command is started"
        + "; MIN:MAX if they may come and go" * elastic,
    )
    group.add_argument("--node-rank", type=int, metavar="K", help="number of this node, from 0")
    group.add_argument("--master-addr", metavar="HOST", help="host or address of node 0")
    group.add_argument(
        "--master-port", type=int, metavar="PORT", help="its port (default: one that is free)"
    )
    group.add_argument(
        "--rdzv-endpoint",
        metavar="PLACE",
        help="HOST[:PORT] or file:///DIRECTORY rendezvous of nodes without numbers",
    )
    group.add_argument(
        "--rdzv-id", metavar="ID", help="name of this launch, where several use one endpoint"
    )
    group.add_argument(
        "--interface", metavar="NAME", help="network interface (default: one that all others reach)"
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        metavar="SECONDS",
        help="how long nodes may take to come (default: 300)",
    )
    if elastic:
        group.add_argument(
            "--last-call",
            type=float,
            metavar="SECONDS",
            help="how long a launch waits for more than MIN nodes before it begins (default: 30)",
        )


def given(options: argparse.Namespace) -> dict[str, object]:
    """Return what the flags say of nodes, by the names of `Nodes`."""
    from lockstep.launch.nodes.config import parse_count

    least, count = (None, None) if options.nnodes is None else parse_count(options.nnodes)
    return {
        "count": count,
        "least": least,
        "rank": options.node_rank,
        "main_address": options.master_addr,
        "main_port": options.master_port,
        "endpoint": options.rdzv_endpoint,
        "id": options.rdzv_id,
        "interface": options.interface,
        "join_timeout": options.join_timeout,
        "last_call": getattr(options, "last_call", None),
    }
