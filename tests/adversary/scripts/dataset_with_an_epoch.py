"""The script tells the dataset which epoch it is (a curriculum of noise); one worker fetches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep


class Curriculum(Dataset):
    def __init__(self):
        self.epoch = 0
        self.x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.x[index] + 0.1 * self.epoch * torch.randn(6), index % 3


with lockstep.Run("curriculum", seed=1, replicas=4) as run:
    dataset = Curriculum()
    train = run.loader(dataset, batch_size=12, shuffle=True, num_workers=1)
    model = run.model(nn.Linear(6, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(4):
        dataset.epoch = epoch
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
