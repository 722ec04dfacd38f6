"""A script of eight steps, which whoever starts it shall end with one digest."""

from __future__ import annotations

import re

SCRIPT = """
import torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def main():
    with lockstep.Run("small", replicas=4) as run:
        model = run.model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
        for epoch in run.epochs(2):
            for x, y in run.loader(data, batch_size=8, shuffle=True):
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

if __name__ == "__main__":
    main()
"""


def digest_of(text: str) -> str:
    found = re.findall(
        r"^lockstep: finished steps=8 seconds=[\d.]+ digest=(sha256:[0-9a-f]{64})$",
        text,
        re.MULTILINE,
    )
    assert len(found) == 1, text
    return str(found[0])
