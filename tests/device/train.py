"""A small training for the simulated accelerator: convolution, BatchNorm, dropout, momentum, workers."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(96, 3, 6, 6), torch.randint(0, 4, (96,)))

with lockstep.Run("ladder", replicas=4, progress=False) as run:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model = run.model(nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(288, 4)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    workers = int(os.environ.get("WORKERS", "0"))
    train = run.loader(DATA, batch_size=16, shuffle=True, num_workers=workers)
    for _ in run.epochs(2):
        for x, y in train:
            assert x.device.type == os.environ["EXPECTED"], x.device
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
