"""Make Accelerate treat this process as the only one, so that a run distributes the training instead."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import state as accelerate_state
from accelerate.utils import DistributedType

from lockstep.engine.training.session import show_plainly
from lockstep.errors import UsageError
from lockstep.integrations import process
from lockstep.run import Run
from lockstep.world import detect

_make_state = accelerate_state.PartialState.__init__


def see_alone() -> None:
    """Make Accelerate treat this process as the only one, but keep its rank.

    So Accelerate neither joins a process group nor splits data, and only the main rank writes and logs.

    Raises:
        UsageError: if Accelerate has joined a process group before.
    """
    show_plainly()
    process.current.on_open = _see_device
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
    if (run := process.current.run) is not None:
        return run.device
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()  # 0 with a torch for CUDA on a machine without a GPU
    if cpu or kind is None or not count:
        return torch.device("cpu")
    return torch.device(kind.type, local_rank % count)


def _see_device(run: Run) -> None:
    """Set the device in Accelerate's shared state to the device of `run`."""
    for state in (accelerate_state.PartialState, accelerate_state.AcceleratorState):
        if state._shared_state:
            state._shared_state["device"] = run.device
