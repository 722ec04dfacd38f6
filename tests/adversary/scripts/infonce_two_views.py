"""SimCLR in small: two augmented views, InfoNCE over what is in the batch, a learnt temperature."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep


class TwoViews(Dataset):
    def __init__(self):
        self.data = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.data)

    def augment(self, x):
        return x * (torch.rand(16) > 0.2) + 0.1 * torch.randn(16)

    def __getitem__(self, index):
        return self.augment(self.data[index]), self.augment(self.data[index])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, first, second):
        a, b = (F.normalize(self.net(view), dim=1) for view in (first, second))
        return a @ b.T / self.log_temperature.exp()


with lockstep.Run("simclr", seed=2, replicas=4) as run:
    train = run.loader(TwoViews(), batch_size=32, shuffle=True, num_workers=1)
    model = run.model(Encoder())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _epoch in run.epochs(8):
        for first, second in train:
            logits = model(first, second)
            labels = torch.arange(len(logits), device=logits.device)
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
            run.log(loss=loss.item())
