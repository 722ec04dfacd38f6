"""Keep references to process groups until the process ends, to avoid deadlocks in their destruction.

Gloo's threads drop the references of a collective after it is done. For a collective of a backward pass,
they need Python's global interpreter lock (GIL). Two faults of torch (seen with 2.13) follow:

- Dropping the last reference to a group joins its threads. `DistributedDataParallel`'s reducer does so
  while it has the GIL; if the reducer outlives `destroy_process_group`, both threads wait forever.
- If the interpreter shuts down while a thread is inside a destructor, the process aborts.

A group whose last reference belongs to Python is safe, since Python releases the GIL during the join.
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

#: Process groups made by Lockstep.
_kept: list[ProcessGroup | None] = []
#: Process groups that the script has destroyed, the newest last.
_destroyed: dict[ProcessGroup, None] = {}
#: Maximum number of destroyed groups that are kept: each has open sockets.
_MOST_DESTROYED = 16
#: Seconds that threads of a group have to get the GIL, if a model still refers to the group.
_TURN = 0.1


def keep(group: ProcessGroup | None) -> None:
    """Keep a reference to a process group until the process ends."""
    _kept.append(group)
    _release_at_exit()


def keep_destroyed() -> None:
    """Patch `torch.distributed.destroy_process_group` to keep references to the destroyed groups.

    This has an effect in forked workers only, where torch is imported before the script runs.
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
    """In a forked child, leak the parent's groups: to destroy them would join threads that do not exist."""
    for group in (*_kept, *_destroyed):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept.clear()
    _destroyed.clear()


os.register_at_fork(after_in_child=_inherit)


def _release_at_exit() -> None:
    atexit.unregister(_release)
    atexit.register(_release)


def _release() -> None:
    """Drop all references to process groups at exit, before the interpreter shuts down.

    If something else still refers to a group, such as a model in a global variable, wait a moment for the
    threads of that group.
    """
    groups = [weakref.ref(group) for group in (*_kept, *_destroyed) if group is not None]
    _kept.clear()
    _destroyed.clear()
    if sys.modules["torch.distributed"].is_initialized() or any(group() for group in groups):
        time.sleep(_TURN)
