"""What the launcher imports once, before it forks, so that no worker has to."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import threading
from collections.abc import Mapping, Sequence

from lockstep.launch import processes, source
from lockstep.launch.openmp import untied
from lockstep.launch.spec import LaunchSpec
from lockstep.registry import STRATEGIES

#: Modules that workers are likely to import and that start neither threads nor CUDA.
MODULES = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
)
#: What `lockstep.Run` brings in, and the exchange that ranks of one host choose by themselves.
_RUN = ("lockstep.training.run", "lockstep.exchange.shared_memory")
#: A second of imports, which the first optimizer of a process brings in.
_DYNAMO = "torch._dynamo"


def likely(spec: LaunchSpec, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the workers of `spec` will import besides, as far as its source and flags tell."""
    strategy = STRATEGIES.find(spec.settings.value("strategy", env) or "auto")
    if strategy.slow_import and isinstance(strategy.hold, str):
        return (*_RUN, _DYNAMO, strategy.hold.partition(":")[0])
    run = _RUN if source.imports(spec, "lockstep") else ()
    return (*run, _DYNAMO) if source.names(spec, "optim") else run


def preload(more: Sequence[str] = ()) -> str | None:
    """Import what workers will need; return why this process should not be forked afterwards, if so.

    Args:
        more: modules besides those that all workers need.
    """
    if threading.active_count() > 1:
        return "Python threads run in the launcher already"
    # The collector would walk the growing heap again and again, and find nothing to free.
    gc.disable()
    try:
        return _import_all(more)
    finally:
        gc.enable()


def _import_all(more: Sequence[str]) -> str | None:
    with untied():
        importlib.import_module("torch")
    # OpenBLAS starts its threads when it is loaded, and takes them through forks by itself.
    threads = processes.task_count()
    for name in MODULES:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if processes.task_count() > threads:
        return "an import started threads in the launcher"
    with contextlib.suppress(Exception):  # a worker that needs it meets the same, and says so
        for name in more:
            importlib.import_module(name)
    if processes.task_count() > threads:
        return f"the import of {', '.join(more)} started threads in the launcher"
    return None
