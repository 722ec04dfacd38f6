"""Destruction of process groups at the end of the process, when no thread can hang on them.

Gloo's threads drop what a collective held after it is done, and a collective of a backward pass holds the
context of Python, so that they need the interpreter's lock for it. A thread that comes late hits two
faults of torch (both seen with 2.13, mostly where a rank's threads share one core):

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

#: Groups of ours, for as long as there is something that can use them.
_kept: list[ProcessGroup | None] = []
#: Groups that the script has destroyed, the newest last.
_destroyed: dict[ProcessGroup, None] = {}
#: How many of earlier ones are held: each has sockets, and a script may make and destroy groups for ever.
_HELD = 16
#: Seconds in which a thread of a group that a model still holds gets the interpreter's lock.
_TURN = 0.1


def keep(group: ProcessGroup | None) -> None:
    """Keep a process group until the process ends."""
    _kept.append(group)
    _part_at_the_end()


def keep_destroyed() -> None:
    """Have `torch.distributed.destroy_process_group` leave a script's groups to the end of the process.

    That is for forked workers, in which torch is there before the script; elsewhere it does nothing.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    _part_at_the_end()
    inner = dist.distributed_c10d
    destroy = inner.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: ProcessGroup | None = None) -> None:
        _hold(tuple(inner._world.pg_map))
        destroy(group)

    dist.destroy_process_group = inner.destroy_process_group = destroy_process_group


def _hold(groups: tuple[ProcessGroup, ...]) -> None:
    earlier = [group for group in _destroyed if group not in groups]
    for group in earlier[:-_HELD]:
        del _destroyed[group]
    _destroyed.update(dict.fromkeys(groups))


def _inherit() -> None:
    """Never let go, in a fork, of the groups of its parent: their threads are not here to be joined."""
    for group in (*_kept, *_destroyed):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept.clear()
    _destroyed.clear()


os.register_at_fork(after_in_child=_inherit)


def _part_at_the_end() -> None:
    atexit.unregister(_let_go)
    atexit.register(_let_go)


def _let_go() -> None:
    """Part from all groups while the interpreter is whole.

    Threads of groups that something else holds, such as a model in a global variable, get a turn.
    """
    groups = [weakref.ref(group) for group in (*_kept, *_destroyed) if group is not None]
    _kept.clear()
    _destroyed.clear()
    if sys.modules["torch.distributed"].is_initialized() or any(group() for group in groups):
        time.sleep(_TURN)
