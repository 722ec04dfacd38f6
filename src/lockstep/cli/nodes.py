"""Flags for several nodes, of the commands `run` and `doctor`."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser, *, elastic: bool) -> None:
    """Add the flags for the number of nodes and their rendezvous; `elastic` allows MIN:MAX nodes."""
    group = parser.add_argument_group(
        "several nodes",
        "Under Slurm and mpiexec the nodes find each other without these flags.",
    )
    add = group.add_argument
    add(
        "--nnodes",
        metavar="NODES",
        help="number of nodes; this command is started on each"
        + "; MIN:MAX for an elastic launch" * elastic,
    )
    add("--node-rank", type=int, metavar="K", help="rank of this node, from 0")
    add("--master-addr", metavar="HOST", help="host name or address of node 0")
    add("--master-port", type=int, metavar="PORT", help="port of node 0 (default: a free one)")
    add(
        "--rdzv-endpoint",
        metavar="PLACE",
        help="rendezvous without --node-rank: HOST[:PORT], or file:///DIRECTORY that all nodes share",
    )
    add("--rdzv-id", metavar="ID", help="id of this launch, if several launches share an endpoint")
    add(
        "--interface",
        metavar="NAME",
        help="network interface (default: one that all other nodes reach)",
    )
    add("--join-timeout", type=float, metavar="SECONDS", help="rendezvous timeout (default: 300)")
    if elastic:
        add(
            "--last-call",
            type=float,
            metavar="SECONDS",
            help="time to wait for further nodes when MIN have joined (default: 30)",
        )


def given(options: argparse.Namespace) -> dict[str, object]:
    """Return the values of the flags that `add` has added, as keyword arguments of `Nodes`."""
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
