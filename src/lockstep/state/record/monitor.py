"""Sample CPU use, memory and GPU use of a rank about once a second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psutil
import torch

from lockstep.world import accelerator, cuda

_EVERY = 1.0
_END_SECONDS = 2.0

#: A function called with the fields of a sample.
Take = Callable[[dict[str, Any]], None]


class Monitor:
    """Samples CPU, memory and GPU use of a process once a second, in a thread that calls `take`.

    `take` is called with the fields of each sample.
    """

    def __init__(self, device: torch.device, take: Take) -> None:
        self._device, self._take = device, take
        self._process = psutil.Process()
        self._process.cpu_percent()  # later calls measure from here
        self._busy = _utilisation(device)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-machine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(_EVERY):
            self._take(self._sample())

    def _sample(self) -> dict[str, Any]:
        return {
            "cpu": round(self._process.cpu_percent() / 100, 3),
            "host": self._process.memory_info().rss,
            "device": accelerator.reserved_memory(self._device),
            "busy": self._busy(),
        }

    def close(self) -> None:
        """Stop taking samples, and wait a little for the thread to end."""
        self._ends.set()
        self._thread.join(_END_SECONDS)


def _utilisation(device: torch.device) -> Callable[[], float | None]:
    """Return a function that returns a GPU's utilization as 0 to 1, from NVML, or `None` if unknown."""
    nvml = cuda.nvml() if cuda.holds(device) else None
    if nvml is None:
        return lambda: None
    try:  # by its UUID: NVML counts all GPUs of the machine, torch those that this process sees
        uuid = f"GPU-{accelerator.uuid(accelerator.current_index(device))}"
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return lambda: None

    def busy() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except nvml.NVMLError:
            return None  # not available for a MIG partition of a GPU

    return busy
