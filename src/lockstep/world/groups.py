"""Destruction of process groups at the end of the process, when no thread can hang on them.

Gloo's threads drop the references of a collective after it is done, and a collective of a backward pass
refers to the context of Python, so that they need the interpreter's lock for it. A thread that comes late
hits two faults of torch (both seen with 2.13, mostly where a rank's threads share one core):

- the thread that drops the last reference to a group joins its threads. `DistributedDataParallel`'s reducer
  does so with the lock in hand, and where it outlives `destroy_process_group`, neither ever continues;
- an interpreter that is being torn down ends the thread in the middle of a destructor, which aborts.

A group whose last reference is Python's own is safe: it gives the lock away while it joins.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Lockstep's groups, for as long as something can use them.
_kept: list[ProcessGroup | None] = []
#: Groups that the script has destroyed, the newest last.
_destroyed: dict[ProcessGroup, None] = {}
#: How many of the earlier ones are kept: each has sockets, and a script may destroy groups for ever.
_MOST_DESTROYED = 16
#: Seconds in which a thread of a group that a model still refers to gets the interpreter's lock.
_TURN = 0.1


def keep(group: ProcessGroup | None) -> None:
    """Keep a process group until the process ends."""
    _kept.append(group)
    _release_at_exit()


def keep_destroyed() -> None:
    """Patch `torch.distributed.destroy_process_group`: a script's groups stay until the process ends.

    Only forked workers need it, in which torch is imported before the script; elsewhere it does nothing.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    _release_at_exit()
    inner = dist.distributed_c10d
    destroy = inner.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: ProcessGroup | None = None) -> None:
        groups = tuple(inner._world.pg_map)
        for earlier in [group for group in _destroyed if group not in groups][:-_MOST_DESTROYED]:
            del _destroyed[earlier]
        _destroyed.update(dict.fromkeys(groups))
        destroy(group)

    dist.destroy_process_group = inner.destroy_process_group = destroy_process_group


def _inherit() -> None:
    """Leak the parent's groups in a fork: their threads are not here to be joined."""
    for group in (*_kept, *_destroyed):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept.clear()
    _destroyed.clear()


os.register_at_fork(after_in_child=_inherit)


def _release_at_exit() -> None:
    atexit.unregister(_release)
    atexit.register(_release)


def _release() -> None:
    """Drop all groups while the interpreter is whole.

    Threads of groups that something else refers to, such as a model in a global variable, get a turn.
    """
    groups = [weakref.ref(group) for group in (*_kept, *_destroyed) if group is not None]
    _kept.clear()
    _destroyed.clear()
    if sys.modules["torch.distributed"].is_initialized() or any(group() for group in groups):
        time.sleep(_TURN)
