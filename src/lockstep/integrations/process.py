"""Code that all adapters use: opening a run without a `with` block, hiding other ranks from Accelerate."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType

from lockstep.engine.training.session import show_plainly
from lockstep.errors import LockstepError, UsageError
from lockstep.run import Run
from lockstep.world.environments import detect


class _Current:
    """Holder of the run that an adapter has opened in this process; the run ends with the script."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.settings: dict[str, Any] = {}

    def end(self, error: BaseException | None = None) -> None:
        """End the run, if one is open, as leaving its `with` block does; `error`: what ended the script."""
        run, self.run = self.run, None
        if run is not None:
            run.__exit__(None if error is None else type(error), error, None)

    def end_with_script(self) -> None:
        """End the run when Python exits; an exception that ended the script is passed to the run."""
        error = getattr(sys, "last_value", None)
        try:
            self.end(error)
        except LockstepError as late:
            if late is error:
                return
            sys.excepthook(type(late), late, late.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(late.exit_code)  # no other way to an exit code from here


_current = _Current()


def open_run(**settings: Any) -> Run:
    """Return this process's open run if its settings are `settings`; else end it and open a new one."""
    if _current.run is not None and _current.settings == settings:
        return _current.run
    if _current.run is None and not _current.settings:
        atexit.register(_current.end_with_script)
    _current.end()
    name = Path(sys.argv[0]).stem.lstrip("-") or "run"
    run = Run(name, progress=False, **settings)
    _current.run, _current.settings = run.__enter__(), settings
    see_device(run.device)
    return run


def end_run() -> None:
    """End the run before the script ends."""
    _current.end()


def replicas_of(replicas: int | None, accumulation: int) -> int | None:
    """Return `replicas * accumulation`: a batch that is accumulated counts as one of an additional replica.

    `None` stands for the default, one replica per rank.

    Raises:
        UsageError: if batches are accumulated, but `replicas` is `None`.
    """
    if replicas is not None:
        return replicas * accumulation
    if accumulation > 1:
        raise UsageError(
            f"gradient_accumulation_steps={accumulation} without replicas; expected a number of "
            "replicas: a batch is accumulated from more replicas than there are ranks",
            hint="replicas=N, as many as processes are to be emulated",
        )
    return None


def refuse(option: str, instead: str) -> None:
    """Raise the error for an option of a framework that a run cannot support; `instead` names what to use.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{option} was given; expected none: it makes the result depend on the layout, or trains by "
        "itself what the run trains",
        hint=instead,
    )


# --- Accelerate's view of the processes ----------------------------------------------------------------

_make_state = accelerate_state.PartialState.__init__


def see_alone() -> None:
    """Make Accelerate treat this process as the only one, but with its rank in the run.

    So Accelerate neither joins a process group nor splits data, and only the main rank writes and logs.

    Raises:
        UsageError: if Accelerate has joined a process group before.
    """
    show_plainly()
    state = accelerate_state.PartialState
    if state._shared_state.get("distributed_type", DistributedType.NO) != DistributedType.NO:
        raise UsageError(
            "accelerate has joined a process group; expected lockstep.integrations to be imported first",
            hint="import from lockstep.integrations at the top of the script",
        )
    state.__init__ = _init_alone
    # What decides whether "on the main process only" looks at the rank.
    state.use_distributed = property(lambda _: detect().size > 1)


def _init_alone(self: Any, cpu: bool = False, **settings: Any) -> None:
    shared = type(self)._shared_state
    if not shared:
        world = detect()
        shared.update(
            _cpu=cpu,
            backend=None,
            debug=False,
            device=_device(cpu=cpu, local_rank=world.local_rank),
            distributed_type=DistributedType.NO,
            num_processes=1,
            process_index=world.rank,
            local_process_index=world.local_rank,
        )
    _make_state(self, cpu, **settings)


def _device(*, cpu: bool, local_rank: int) -> torch.device:
    if _current.run is not None:
        return _current.run.device
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    return (
        torch.device("cpu") if cpu or kind is None else torch.device(kind.type, local_rank % count)
    )


def see_device(device: torch.device) -> None:
    """Make Accelerate use `device`, the device of the run."""
    for state in (accelerate_state.PartialState, accelerate_state.AcceleratorState):
        if state._shared_state:
            state._shared_state["device"] = device
