"""Check GPUs: free memory, other processes, throttling, ECC errors, and peer access."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.launch.devices.gpus import list_gpus
from lockstep.tools.doctor.check import Facts, Finding, NodeReports, Options, check, listed
from lockstep.tools.quantities import binary_size

#: Bits of NVML's reasons for clocks lowered against the user's wish: HwSlowdown, SwThermalSlowdown,
#: HwThermalSlowdown and HwPowerBrakeSlowdown.
_SLOWED = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
_NO_NVML = "throttling, ECC and processes are not looked at: pip install 'torch-lockstep[gpu]'"


def _look(_: Options) -> Facts:
    import torch

    from lockstep.world import accelerator, cuda

    kind, count = accelerator.kind(), accelerator.count()
    if kind is None:
        return {"none": f"torch {torch.__version__} is built for processors only", "gpus": []}
    if not cuda.holds(torch.device(kind)):
        own = accelerator.facts()
        text = f"{count} of {own.label} as {kind}, backend {own.backend}, visible by {own.visible}"
        return {"listing": text, "gpus": [_gpu(k, None) for k in range(count)], "peers": []}
    listing = list_gpus()
    if not count:
        if listing.gpus:
            return {"unseen": len(listing.gpus), "gpus": []}
        return {"none": f"torch sees no GPU: {listing.problem or 'there is none'}", "gpus": []}
    nvml = cuda.nvml()
    return {
        "gpus": [_gpu(index, nvml) for index in range(count)],
        "nvml": nvml is not None,
        "peers": cuda.peers(count),
    }


def _gpu(index: int, nvml: Any) -> dict[str, Any]:
    from lockstep.world import accelerator

    properties = accelerator.module().get_device_properties(index)
    free, total = accelerator.module().mem_get_info(index)
    facts: dict[str, Any] = {"name": properties.name, "total": total, "free": free}
    if nvml is None:
        return facts
    try:  # by UUID: NVML numbers all GPUs of the machine, torch only those that this process sees
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except nvml.NVMLError:
        return facts  # a MIG partition of a GPU
    ecc = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    asked: dict[str, Callable[[], Any]] = {
        "processes": lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle),
        "slowed": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "ecc": lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, *ecc),
    }
    for name, ask in asked.items():
        with contextlib.suppress(nvml.NVMLError):  # not available for this model of GPU
            facts[name] = ask()
    facts["processes"] = [one.pid for one in facts.get("processes", ()) if _is_other(one.pid)]
    return facts


def _is_other(pid: int) -> bool:
    """Whether `pid`, a process on a GPU, exists here and was not started by this `lockstep doctor`.

    Processes outside this container do not exist here.
    """
    import psutil

    try:
        return bool(psutil.Process(pid).ppid() != os.getppid())
    except psutil.NoSuchProcess:
        return False


@check("gpus", look=_look, seconds=20)
def gpus(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on GPUs: use by others, throttling, defects, several kinds, no peer access."""
    for label, facts in seen.of("gpus"):
        on = seen.on(label)
        if "unseen" in facts:
            text = f"{on}nvidia-smi lists {facts['unseen']} GPUs, and torch sees none"
            advice = "look at CUDA_VISIBLE_DEVICES, the driver's version, docker run --gpus all"
            yield Finding("failure", text, advice)
        for index, gpu in enumerate(facts["gpus"]):
            yield from _problems(f"{on}GPU {index} ({gpu['name']})", gpu)
        yield from _peers(on, facts.get("peers", []))
        if facts.get("nvml") is False:
            yield Finding("skipped", f"{on}{_NO_NVML}")
    each = [(label, _words(facts)) for label, facts in seen.of("gpus") if "unseen" not in facts]
    kinds = {gpu["name"] for _, facts in seen.of("gpus") for gpu in facts["gpus"]}
    if len(kinds) > 1:
        text = (
            f"GPUs are of {len(kinds)} kinds: {', '.join(sorted(kinds))}; each computes other bits"
        )
        yield Finding("warning", text, "train on GPUs of one kind: --devices")
    if each:
        yield Finding("ok" if kinds else "skipped", listed(each, seen))


def _problems(where: str, gpu: Facts) -> Iterator[Finding]:
    if gpu["free"] < gpu["total"] // 2:
        text = f"{where}: {binary_size(gpu['free'])} of {binary_size(gpu['total'])} are free"
        yield Finding("warning", text, "end what uses it (nvidia-smi), or choose others: --devices")
    if gpu.get("processes"):
        numbers = ", ".join(map(str, gpu["processes"]))
        text = f"{where}: other processes compute on it: {numbers}"
        yield Finding("warning", text, "end them, or choose other GPUs: --devices")
    if slowed := {name for bit, name in _SLOWED.items() if (gpu.get("slowed") or 0) & bit}:
        text = f"{where}: its clocks are lowered by {', '.join(sorted(slowed))}"
        yield Finding("warning", text, "look at cooling and power: nvidia-smi -q -d PERFORMANCE")
    if gpu.get("ecc"):
        text = f"{where}: {gpu['ecc']} memory errors that were not corrected since the driver was loaded"
        yield Finding(
            "failure", text, "reset it (nvidia-smi --gpu-reset); replace it if they come back"
        )


def _peers(on: str, peers: list[list[bool]]) -> Iterator[Finding]:
    pairs = [(a, b) for a in range(len(peers)) for b in range(len(peers)) if a < b]
    without = [f"{a}-{b}" for a, b in pairs if not (peers[a][b] and peers[b][a])]
    if without and len(without) < len(pairs):
        text = f"{on}GPUs without a way to each other's memory: {', '.join(without)}; the others have one"
        yield Finding("warning", text, "look at nvidia-smi topo -m, and at ACS in the BIOS")


def _words(facts: Facts) -> str:
    if not facts["gpus"]:
        return str(facts.get("none") or facts["listing"])
    direct = sum(map(sum, facts["peers"])) // 2
    sizes = [(gpu, binary_size(gpu["free"]), binary_size(gpu["total"])) for gpu in facts["gpus"]]
    each = "; ".join(f"{gpu['name']}, {free} of {total} free" for gpu, free, total in sizes)
    if "listing" in facts:
        return f"{facts['listing']}: {each}"
    return f"{each}; {direct} pairs reach each other's memory"
