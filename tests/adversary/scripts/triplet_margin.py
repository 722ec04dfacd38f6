"""Metric learning with triplets that the dataset draws with Python's random module."""

import random

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep


class Triplets(Dataset):
    def __init__(self, count=90):
        generator = torch.Generator().manual_seed(0)
        self.labels = [i % 5 for i in range(count)]
        self.points = torch.randn(count, 8, generator=generator)
        self.points += torch.tensor(self.labels)[:, None] * 0.2
        self.by_label = {k: [i for i in range(count) if i % 5 == k] for k in range(5)}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        positive = random.choice(self.by_label[label])
        negative = random.choice(self.by_label[random.choice([k for k in range(5) if k != label])])
        return self.points[index], self.points[positive], self.points[negative]


with lockstep.Run("triplet", seed=23, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 4)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    criterion = nn.TripletMarginLoss(margin=0.5)
    loader = run.loader(Triplets(), batch_size=18, shuffle=True)
    for _epoch in run.epochs(4):
        for anchor, positive, negative in loader:
            loss = criterion(model(anchor), model(positive), model(negative))
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
