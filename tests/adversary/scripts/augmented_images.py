"""Random flips, crops, noise and Cutout in the dataset, drawn from three generators, with two workers."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Images(Dataset):
    def __init__(self):
        self.images = torch.rand(80, 3, 12, 12, generator=torch.Generator().manual_seed(3))
        self.labels = torch.arange(80) % 4

    def __len__(self):
        return 80

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(2)
        top, left = np.random.randint(0, 4, size=2)
        image = F.pad(image, (2, 2, 2, 2))[:, top : top + 12, left : left + 12].clone()
        row = int(torch.randint(0, 8, (1,)))
        image[:, row : row + 4] = 0
        return image + 0.05 * torch.randn_like(image), self.labels[index]


if __name__ == "__main__":
    loader = DataLoader(Images(), batch_size=16, shuffle=True, num_workers=2, drop_last=True)
    with lockstep.Run("augmented", seed=31, replicas=4) as run:
        train = run.loader(loader)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
        )  # fmt: skip
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _epoch in run.epochs(4):
            for images, labels in train:
                run.backward(F.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
