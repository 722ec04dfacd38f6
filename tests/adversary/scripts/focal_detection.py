"""Two heads on one backbone: focal loss for the class, SmoothL1 for the box of positive samples."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.cls = nn.Linear(32, 1)
        self.box = nn.Linear(32, 4)

    def forward(self, images):
        features = self.backbone(images).flatten(1)
        return self.cls(features).squeeze(1), self.box(features)


def focal(logits, labels, gamma=2.0, alpha=0.25):
    bce = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    p = torch.exp(-bce)
    weight = torch.where(labels > 0, alpha, 1 - alpha)
    return (weight * (1 - p) ** gamma * bce).mean()


with lockstep.Run("focal", seed=5, replicas=4) as run:
    data = TensorDataset(
        torch.randn(72, 3, 10, 10), (torch.rand(72) > 0.8).float(), torch.rand(72, 4)
    )
    train = run.loader(data, batch_size=12, shuffle=True)
    model = run.model(Detector())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for _epoch in run.epochs(4):
        for images, labels, boxes in train:
            logits, predicted = model(images)
            loss = focal(logits, labels)
            if (labels > 0).any():
                loss = loss + F.smooth_l1_loss(predicted[labels > 0], boxes[labels > 0])
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
