"""Train an MLP of 2.2 million parameters; the main rank prints a step's milliseconds and its host's bytes.

`--by` names what sums the gradients: an exchange of Lockstep, started by `lockstep run`, or plain DDP or
Accelerate, started by torchrun. `flat` is the exchange `tree` that takes each rank for a host of its own;
`direct` is the one whose hosts each send to each other one, however many there are.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

WIDTH = 1024
WARM_UP = 4


class Meter:
    """Measures the steps after the warm-up, and the bytes that leave an interface meanwhile."""

    def __init__(self, interface: str, steps: int) -> None:
        self._path = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self.steps = steps
        self._began: float | None = None

    def after(self, step: int) -> None:
        """Note the state after a step; after the warm-up and after the last one, wait for all ranks."""
        if step == WARM_UP and self._began is None:  # an audited batch comes here twice
            dist.barrier()
            self._before, self._began = self._sent(), time.perf_counter()
            self._computing = time.process_time()
        if step == WARM_UP + self.steps and self._began is not None:
            dist.barrier()
            self._seconds = time.perf_counter() - self._began
            self._computing = time.process_time() - self._computing
            self._bytes = self._sent() - self._before

    def _sent(self) -> float:
        return float(self._path.read_text())

    def tell(self, parameters: int, digest: float) -> None:
        """Print a line of JSON."""
        told = {
            "milliseconds": 1000 * self._seconds / self.steps,
            "processor_milliseconds": 1000 * self._computing / self.steps,
            "bytes": self._bytes / self.steps,
            "model": 4 * parameters,
            "digest": digest,
        }
        print(f"told: {json.dumps(told)}", flush=True)


def network() -> nn.Module:
    """Return the model, the same on all ranks."""
    torch.manual_seed(0)
    middle = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), middle, nn.ReLU(), nn.Linear(WIDTH, 64)
    )


def samples(count: int) -> torch.Tensor:
    """Return random inputs."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def with_lockstep(by: str, meter: Meter) -> None:
    """Train with an exchange of Lockstep."""
    import lockstep
    from lockstep.engine.layout import halving
    from lockstep.world import host

    with lockstep.Run("hosts", seed=0, progress=False, threads=1, exact=by != "native") as run:
        if by == "flat":
            host.identity = lambda: f"rank {run.world.rank}"  # type: ignore[assignment]
        if by in ("direct", "flat"):
            halving.FEWEST = 1 << 30
        model = run.model(network())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        data = TensorDataset(samples(run.world.size * (WARM_UP + meter.steps)))
        for (x,) in run.loader(data, batch_size=run.world.size):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            meter.after(run.step)
        if run.is_main_process:
            with torch.no_grad():
                total = float(sum(p.double().sum() for p in model.parameters()))
            meter.tell(sum(p.numel() for p in model.parameters()), total)


def with_torch(by: str, meter: Meter) -> None:
    """Train with plain DDP, or with Accelerate."""
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if by == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    else:
        dist.init_process_group("gloo")
        wrapped, backward = DistributedDataParallel(model), torch.Tensor.backward
    size, rank = dist.get_world_size(), dist.get_rank()
    data = samples(size * (WARM_UP + meter.steps))
    for step in range(WARM_UP + meter.steps):
        optimizer.zero_grad()
        backward(wrapped(data[step * size + rank : step * size + rank + 1]).square().mean())
        optimizer.step()
        meter.after(step + 1)
    if rank == 0:
        meter.tell(sum(p.numel() for p in model.parameters()), 0)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interface", default="eth0")
    options = parser.parse_args()
    meter = Meter(options.interface, options.steps)
    plain = options.by in ("ddp", "accelerate")
    (with_torch if plain else with_lockstep)(options.by, meter)


if __name__ == "__main__":
    main()
