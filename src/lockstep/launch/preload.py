"""What the launcher imports once, before it forks, so that no worker has to."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import threading

from lockstep.launch import processes
from lockstep.launch.openmp import untied

#: Modules that workers are likely to import and that start neither threads nor CUDA.
MODULES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "lockstep.training.run",
)


def preload() -> str | None:
    """Import what workers will need; return why this process should not be forked afterwards, if so."""
    if threading.active_count() > 1:
        return "Python threads run in the launcher already"
    # The collector would walk the growing heap again and again, and find nothing to free.
    gc.disable()
    try:
        return _import_all()
    finally:
        gc.enable()


def _import_all() -> str | None:
    with untied():
        importlib.import_module("torch")
    # OpenBLAS starts its threads when it is loaded, and takes them through forks by itself.
    threads = processes.task_count()
    for name in MODULES:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if processes.task_count() > threads:
        return "an import started threads in the launcher"
    return None
