"""Limits of a process's Linux control groups (cgroups): CPU time, memory, and out-of-memory kills.

Every group between the process and the root may set a limit; the smallest limit applies. Groups above a
container's own are invisible inside the container, with their limits.

https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max),
https://docs.kernel.org/scheduler/sched-bwc.html (version 1: cpu.cfs_quota_us),
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (version 1: memory.limit_in_bytes,
memory.oom_control).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: Directory of this process in `/proc`.
_SELF = Path("/proc/self")


def cpu_quota(process: Path = _SELF) -> float | None:
    """Return the number of CPUs whose time a process may use; `None` if unlimited.

    `process` is the process's directory in `/proc`, by default that of this process.
    """
    limits = [limit for group in _groups(process, "cpu") if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def memory_left(process: Path = _SELF) -> int | None:
    """Return how many more bytes of memory a process may use; `None` if unlimited.

    `process` is the process's directory in `/proc`, by default that of this process.
    """
    left = [left for group in _groups(process, "memory") if (left := _left(group)) is not None]
    return min(left, default=None)


def oom_kills(process: Path = _SELF) -> int | None:
    """Return the number of out-of-memory kills in a process's cgroup; `None` if there is no count.

    `process` is the process's directory in `/proc`, by default that of this process. If the cgroup has no
    memory controller, the count of the next cgroup above with one is returned.
    """
    for group in _groups(process, "memory"):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, and of version 1
            if "oom_kill" in (counters := _pairs(group / name)):
                return int(counters["oom_kill"])
    return None


def _groups(process: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of a process's cgroups with `controller`, from its own up to the root.

    `process` is the process's directory in `/proc`; `controller` is `cpu` or `memory`.
    """
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            if _has(controller, mount, controllers):
                point = Path(mount[4].replace("\\040", " "))  # how mountinfo writes blanks
                yield from _upwards(root=mount[3], point=point, path=path)


def _has(controller: str, mount: list[str], controllers: str) -> bool:
    """Return whether a mount contains the directory of a process's cgroup for `controller`.

    `mount` is a line of `/proc/PID/mountinfo`, split into words. `controllers` is the second field of the
    line for the cgroup in `/proc/PID/cgroup`: controller names with commas in version 1, empty in version
    2.
    """
    kind, _, options = mount[mount.index("-") + 1 :][:3]
    if kind == "cgroup2":
        return controllers == ""
    names = controllers.split(",")
    return kind == "cgroup" and controller in names and controller in options.split(",")


def _upwards(*, root: str, point: Path, path: str) -> Iterator[Path]:
    # In a container, the mount may show the tree from the container's group on.
    own, top = PurePosixPath(path), PurePosixPath(root)
    group = point / (own.relative_to(top) if own.is_relative_to(top) else "")
    if ".." in own.parts or not group.is_dir():
        group = point
    while group != point:
        yield group
        group = group.parent
    yield point


def _limit(group: Path) -> float | None:
    v1 = (group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
    match _read(group / "cpu.max") or _read(*v1):
        case [quota, period] if quota != "max" and int(quota) > 0:
            return int(quota) / int(period)
        case _:
            return None


def _left(group: Path) -> int | None:
    for most, now in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        match _read(group / most, group / now):
            case [limit, used] if limit != "max":
                # The kernel gives up cached files before it kills a process.
                cached = int(_pairs(group / "memory.stat").get("inactive_file", 0))
                return max(0, int(limit) - int(used) + cached)
    return None


def _pairs(file: Path) -> dict[str, str]:
    words = _read(file)
    return dict(zip(words[::2], words[1::2], strict=False))


def _read(*files: Path) -> list[str]:
    try:
        return [word for file in files for word in file.read_text().split()]
    except OSError:
        return []
