"""Matrix factorisation: two embeddings, Adagrad, a warmup by LambdaLR."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Factorisation(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.bias = nn.Embedding(items, 1)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1) + self.bias(item).squeeze(1)


with lockstep.Run("ratings", seed=11, replicas=3) as run:
    user, item = torch.randint(0, 20, (200,)), torch.randint(0, 30, (200,))
    rating = ((user * 7 + item * 3) % 5).float()
    train = run.loader(TensorDataset(user, item, rating), batch_size=32, shuffle=True)
    model = run.model(Factorisation(20, 30, 8))
    optimizer = run.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.2))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    warmup = run.scheduler(warmup)
    for _epoch in run.epochs(4):
        for user, item, rating in train:
            optimizer.zero_grad()
            loss = (model(user, item) - rating).square().mean()
            run.backward(loss)
            optimizer.step()
            warmup.step()
