"""One model, two optimizers: SGD for the embedding, Adam for the rest, each with its scheduler."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, tokens):
        return self.body(self.embedding(tokens))


with lockstep.Run("tagger", seed=8, replicas=4) as run:
    model = run.model(Tagger())
    sparse_part = run.optimizer(torch.optim.SGD(model.embedding.parameters(), lr=0.5))
    dense_part = run.optimizer(torch.optim.Adam(model.body.parameters(), lr=0.01))
    schedulers = [
        run.scheduler(torch.optim.lr_scheduler.ExponentialLR(sparse_part, 0.8)),
        run.scheduler(torch.optim.lr_scheduler.StepLR(dense_part, 2)),
    ]
    tokens = torch.randint(0, 40, (96, 7))
    train = run.loader(TensorDataset(tokens, tokens % 6), batch_size=16, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            sparse_part.zero_grad()
            dense_part.zero_grad()
            run.backward(loss)
            sparse_part.step()
            dense_part.step()
        for scheduler in schedulers:
            scheduler.step()
