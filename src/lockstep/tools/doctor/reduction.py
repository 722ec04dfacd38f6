"""Check a small all-reduce with a known result, with gloo, and with NCCL on nodes with GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from lockstep.launch.agent.child import Child, LostError
from lockstep.tools.doctor.check import Facts, Finding, NodeReports, Options, check
from lockstep.tools.doctor.node_rendezvous import NodeGroup
from lockstep.world.network import LOOPBACK, interfaces
from lockstep.world.rendezvous.store import connect_store, host_store

_SECONDS = 8.0
_ELEMENTS = 1 << 18  # 1 MiB
_DEBUG = {"gloo": "TORCH_DISTRIBUTED_DEBUG=DETAIL", "nccl": "NCCL_DEBUG=INFO"}
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def start(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run this node's ranks of one all-reduce, each in a child process; return a result for each rank.

    `job` has the backend, the address of the store, the number of this node's first rank, the numbers of
    ranks in all and on this node, and the network interface.
    """
    children = [
        Child(reduce).give({**job, "rank": job["first"] + local, "local": local})
        for local in range(job["here"])
    ]
    results: list[dict[str, Any]] = []
    for child in children:
        try:
            results.append(child.result(2 * _SECONDS))
        except LostError as error:
            results.append({"problem": str(error)})
    return results


def reduce(job: dict[str, Any]) -> dict[str, Any]:
    """Run one rank of an all-reduce; return the number of wrong elements, and the milliseconds it took.

    `job` is that of `start`, with the rank and the local rank added.
    """
    import torch
    import torch.distributed as dist

    from lockstep.world import accelerator

    for name in _VARIABLES:
        if job["interface"]:
            os.environ.setdefault(name, job["interface"])
    torch.set_num_threads(1)
    on_gpu = job["backend"] != "gloo"
    device = accelerator.use(job["local"]) if on_gpu else torch.device("cpu")
    rank, size = job["rank"], job["size"]
    store = dist.PrefixStore(job["backend"], connect_store(job["address"], job["port"]))
    timeout = timedelta(seconds=_SECONDS)
    dist.init_process_group(
        job["backend"], store=store, rank=rank, world_size=size, timeout=timeout
    )
    pattern = (torch.arange(_ELEMENTS) % 1024).float()  # sums are whole numbers, which are exact
    values = (pattern + rank).to(device)
    began = time.perf_counter()
    dist.all_reduce(values)
    summed = values.cpu()
    milliseconds = 1000 * (time.perf_counter() - began)
    expected = pattern * size + size * (size - 1) // 2
    return {"wrong": int((summed != expected).sum()), "ms": milliseconds}


def _together(rendezvous: NodeGroup, seen: NodeReports, _: Options) -> Facts:
    """Run a small all-reduce over all nodes, with gloo and, if all have GPUs, NCCL; return results.

    If nodes have different versions, or do not reach each other, the check is skipped, and the reason is
    returned.
    """
    kinds = {str((report.get("versions") or {}).get("bits")) for report in seen.reports}
    if len(kinds) > 1:
        return {"skipped": "nodes have unlike versions, which a launch refuses"}
    if rendezvous.several_hosts and not rendezvous.reach:
        return {"skipped": "not all nodes reach each other"}
    gpus = [len((report.get("gpus") or {}).get("gpus", ())) for report in seen.reports]
    counts = [count or (2 if seen.alone else 1) for count in gpus]  # ranks of each node
    own = rendezvous.reach[rendezvous.index] if rendezvous.reach else None
    here = own.name if own else next((one.name for one in interfaces() if one.loopback), None)
    store = host_store(0, loopback=not rendezvous.reach) if rendezvous.index == 0 else None
    job = {
        "address": rendezvous.reach[0].address if rendezvous.reach else LOOPBACK,
        "port": rendezvous.gather("all-reduce", store and int(store.port))[0],
        "first": sum(counts[: rendezvous.index]),
        "here": counts[rendezvous.index],
        "size": sum(counts),
        "interface": here,
    }
    backends = ("gloo", "nccl") if all(gpus) else ("gloo",)
    return {
        backend: starter.give({**job, "backend": backend}).result(3 * _SECONDS)
        for backend, starter in zip(backends, rendezvous.starters, strict=False)
    }


@check("all-reduce", together=_together, seconds=60)
def all_reduce(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on the all-reduce of each backend: that it fails, has wrong sums, or works.

    If the test was skipped, yield one finding with the reason.
    """
    answers = seen.of("all-reduce")
    if answers and "skipped" in answers[0][1]:
        yield Finding("skipped", answers[0][1]["skipped"])
        return
    for backend in answers[0][1] if answers else ():
        each = [(label, one) for label, facts in answers for one in facts[backend]]
        failed = [(label, one["problem"]) for label, one in each if "problem" in one]
        wrong = [(label, one["wrong"]) for label, one in each if one.get("wrong")]
        if failed:
            label, why = failed[0]
            text = f"{backend} on {len(each)} ranks: {seen.on(label)}{why}"
            advice = f"--interface NAME, a firewall, or {_DEBUG[backend]} to see more"
            yield Finding("failure", text, advice)
        for label, count in wrong:
            text = f"{backend} on {len(each)} ranks: {seen.on(label)}{count} of {_ELEMENTS} sums are wrong"
            advice = "take this node out: its memory or its network is defective"
            yield Finding("failure", text, advice)
        if not failed and not wrong:
            took = f"1 MiB in {max(one['ms'] for _, one in each):.0f} ms"
            yield Finding("ok", f"{backend} on {len(each)} ranks: {took}, all sums right")
