"""Check limits of the system and its control groups: shared memory, open files, memory, cores."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

from lockstep.tools.doctor.check import Facts, Finding, Level, Options, check_each
from lockstep.tools.quantities import binary_size
from lockstep.world.cgroups import cpu_quota, memory_left
from lockstep.world.cores import show_list, usable_cores

_SHM = Path("/dev/shm")  # noqa: S108 - the one that DataLoader workers and NCCL use
_MIB, _GIB = 1 << 20, 1 << 30
#: Docker's default size: one DataLoader worker may need more.
_SMALL_SHM = 64 * _MIB
_MORE_SHM = (
    "free it (ls -l /dev/shm), or give more: docker run --shm-size=8g, an emptyDir with medium: Memory in "
    "Kubernetes, mount -o remount,size=50% /dev/shm"
)
_FILES = 1024


def _look_shm(_: Options) -> Facts:
    if not _SHM.is_dir():
        return {"missing": True}
    found = os.statvfs(_SHM)
    free = found.f_bavail * found.f_frsize
    facts: dict[str, Facts] = {"size": found.f_blocks * found.f_frsize, "free": free}
    try:
        with tempfile.TemporaryFile(dir=_SHM, prefix="lockstep-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, _MIB)
    except OSError as error:
        facts["problem"] = os.strerror(error.errno or 0).lower()
    return facts


@check_each("shm", look=_look_shm)
def shm(facts: Facts) -> list[Finding] | str:
    """Judge a node's facts on shared memory: whether it is full, or too small for DataLoader workers."""
    if facts.get("missing"):
        return [Finding("failure", f"there is no {_SHM}", "mount a tmpfs there")]
    left = f"{binary_size(facts['free'])} of {binary_size(facts['size'])} are free"
    if "problem" in facts:
        text = f"1 MiB cannot be had of {_SHM}: {facts['problem']}; {left}"
        return [Finding("failure", text, _MORE_SHM)]
    if facts["free"] <= _SMALL_SHM:
        text = f"{_SHM} is small: {left}; DataLoader workers put their batches there"
        return [Finding("warning", text, _MORE_SHM)]
    return f"{_SHM}: {left}"


def _look_limits(_: Options) -> Facts:
    names = {
        "files": resource.RLIMIT_NOFILE,
        "locked": resource.RLIMIT_MEMLOCK,
        "addresses": resource.RLIMIT_AS,
        "processes": resource.RLIMIT_NPROC,
    }
    soft = {name: resource.getrlimit(which)[0] for name, which in names.items()}
    return {**soft, "rdma": Path("/sys/class/infiniband").is_dir()}


@check_each("limits", look=_look_limits)
def limits(facts: Facts) -> list[Finding] | str:
    """Return warnings about a node's low limits for a process, or a text if none is low.

    Limits are the numbers of open files and of processes, the address space, and locked memory. The text
    states how many files a process may open.
    """
    limited = {name: limit for name, limit in facts.items() if limit != resource.RLIM_INFINITY}
    files, processes = limited.get("files", _FILES), limited.get("processes", _FILES)
    addresses, locked = (binary_size(limited.get(name, 0)) for name in ("addresses", "locked"))
    found = []
    if files < _FILES:
        text = f"a process may open {files} files; expected at least {_FILES}"
        found.append((text, "ulimit -n 65536: DataLoader workers pass on open files"))
    if "addresses" in limited:
        text = f"a process may have {addresses} of addresses; expected no limit"
        found.append((text, "ulimit -v unlimited: CUDA reserves more than it uses"))
    if facts["rdma"] and "locked" in limited:
        text = f"a process may lock {locked} of memory; RDMA needs more"
        found.append((text, "ulimit -l unlimited (docker run --ulimit memlock=-1)"))
    if processes < _FILES:
        text = f"this user may have {processes} processes and threads; expected {_FILES}"
        found.append((text, "ulimit -u 4096, or TasksMax= of the systemd unit"))
    warnings = [Finding("warning", text, advice) for text, advice in found]
    return warnings or f"a process may open {limited.get('files', 'any number of')} files"


def _look_memory(_: Options) -> Facts:
    import psutil

    system = psutil.virtual_memory()
    return {"free": system.available, "total": system.total, "group": memory_left()}


@check_each("memory", look=_look_memory)
def memory(facts: Facts) -> list[Finding] | str:
    """Judge whether a node has enough free memory, also within this process's control group.

    Return a text if at least 1 GiB is free, otherwise a finding: a warning, or a failure below 256 MiB.
    """
    group = facts["group"]
    left = facts["free"] if group is None else min(facts["free"], group)
    by = "" if left == facts["free"] else " by its control group"
    text = f"{binary_size(left)} of {binary_size(facts['total'])} are left{by}"
    if left >= _GIB:
        return text
    advice = "end what uses it (ps aux --sort=-rss), or raise the limit of the container or the job"
    level: Level = "failure" if left < _GIB // 4 else "warning"
    return [Finding(level, f"{text}; expected at least 1 GiB", advice)]


def _look_cores(_: Options) -> Facts:
    return {
        "machine": os.cpu_count(),
        "affinity": show_list(os.sched_getaffinity(0)),
        "quota": cpu_quota(),
        "usable": usable_cores(),
    }


@check_each("cores", look=_look_cores)
def cores(facts: Facts) -> list[Finding] | str:
    """Judge the number of cores that this process may use on a node."""
    quota = "" if facts["quota"] is None else f", a quota of {facts['quota']:g}"
    affinity = f"affinity {facts['affinity']} of {facts['machine']} processors"
    text = f"{facts['usable']} usable; {affinity}{quota}"
    if facts["usable"] > 1 or facts["machine"] == 1:
        return text
    advice = "srun -c N, docker run --cpus N or taskset: ranks and DataLoader workers share it"
    return [Finding("warning", text, advice)]
