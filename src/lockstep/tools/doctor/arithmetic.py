"""Two short trainings that show whether a device computes the right bits.

The first training is exact: all its numbers are multiples of a power of two, and so small that no sum or
product is rounded, in any order and with any instructions. Its result is known beforehand, so wrong bits
are found on a single machine. The second is an ordinary training with common kernels; devices of one kind
get the same digest.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from lockstep.engine.training.digest import digest

#: Digest of the exact training; tests compute it with Python's integers.
EXACT = "sha256:66752e1474ac3b5310d85b1dbdc1c4f6d10af5a886f9aa8ed32a98e6263724b1"
STEPS, BATCH, SIZES = 10, 16, (8, 8, 4)
#: Weights are rounded to multiples of 1 / UNIT in [-LARGEST, LARGEST]; RATE is the learning rate. Gradients
#: of the outputs are whole numbers.
UNIT, LARGEST, RATE = 16, 2, 2.0**-10


def exact_digest(device: str = "cpu") -> str:
    """Train ten steps without rounding errors; return the SHA-256 digest of all outputs and gradients."""
    first, second = (nn.Linear(*sizes, bias=False) for sizes in itertools.pairwise(SIZES))
    model = nn.Sequential(first, nn.ReLU(), second).to(device)
    with torch.no_grad():
        for number, layer in enumerate((first, second)):
            layer.weight.copy_(_numbers(layer.weight.numel(), 5 + number).view_as(layer.weight) / 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seen = []  # digests of weights alone could miss an error, since weights are rounded
    for step in range(STEPS):
        inputs = _numbers(BATCH * SIZES[0], step).view(BATCH, SIZES[0]).to(device)
        outputs = model(inputs)
        outputs.backward((outputs.detach() / UNIT).round().clamp(-4, 4) + 1)
        seen += [
            outputs.detach(),
            *(one.grad.clone() for one in model.parameters() if one.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(UNIT).round_().div_(UNIT).clamp_(-LARGEST, LARGEST)
    return digest(
        [{str(place): (one + 0.0).cpu() for place, one in enumerate(seen)}]
    )  # -0 and 0 are one number


def _numbers(count: int, start: int) -> torch.Tensor:
    """Return a tensor of `count` whole numbers from -3 to 3; a different `start` gives other numbers."""
    return ((torch.arange(count) * 5 + torch.arange(count) // 7 + start * 3) % 7 - 3).float()


def ordinary_digest(device: str = "cpu") -> str:
    """Train a small model for ten ordinary steps with a fixed seed; return the digest of its state."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(8 * 14 * 14, 32), nn.GELU(), nn.Linear(32, 10)),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 3, 16, 16, generator=generator)
        labels = torch.randint(10, (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return digest([{name: one.cpu() for name, one in model.state_dict().items()}])
