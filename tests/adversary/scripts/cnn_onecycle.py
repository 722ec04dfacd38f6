"""A small CNN with BatchNorm under OneCycleLR, evaluated after every epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


with lockstep.Run("cnn", seed=3, replicas=4) as run:
    labels = torch.randint(0, 4, (128,))
    images = torch.randn(128, 1, 12, 12) + labels[:, None, None, None] * 0.3
    train = run.loader(TensorDataset(images[:96], labels[:96]), batch_size=16, shuffle=True)
    test = run.loader(TensorDataset(images[96:], labels[96:]), batch_size=16)
    model = run.model(Net())
    optimizer = run.optimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    )
    scheduler = run.scheduler(
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, epochs=4, steps_per_epoch=len(train)
        )
    )
    for epoch in run.epochs(4):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            accuracy = run.mean(model(x).argmax(1) == y for x, y in test)
        run.print(f"epoch {epoch}: {accuracy:.1%}")
        run.save(best=accuracy)
