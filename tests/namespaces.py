"""Hosts as a process enters them: a network namespace, a host name, names of other hosts, directories."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

#: Per namespace, files that stand in the place of those in /etc.
NAMES = Path("/etc/netns")
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 4096, 16384, 1 << 19, 2


def enter(namespace: str, name: str, hidden: str = "") -> None:
    """Let this process, which has one thread, go on as one of a host, as under `ip netns exec`.

    Args:
        namespace: the system's name of it.
        name: of the host.
        hidden: a directory that the host does not share with the others: it sees an empty one.
    """
    with Path(f"/run/netns/{namespace}").open() as file:
        _check(_LIBC.setns(file.fileno(), _CLONE_NEWNET))
    _check(_LIBC.unshare(_CLONE_NEWUTS | _CLONE_NEWNS))
    socket.sethostname(name)
    _mount("none", "/", None, _MS_SLAVE | _MS_REC)
    _check(_LIBC.umount2(b"/sys", _MNT_DETACH))
    _mount(name, "/sys", "sysfs")
    for given in (NAMES / namespace).glob("*"):
        _mount(os.fspath(given), f"/etc/{given.name}", None, _MS_BIND)
    if hidden:
        _mount("none", hidden, "tmpfs")


def _mount(source: str, place: str, kind: str | None, flags: int = 0) -> None:
    named = None if kind is None else kind.encode()
    _check(_LIBC.mount(source.encode(), place.encode(), named, ctypes.c_ulong(flags), None))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
