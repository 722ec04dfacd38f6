"""The mean of the last five losses drives the learning rate: a deque of a bounded length is registered."""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Window:
    def __init__(self):
        self.losses = deque(maxlen=5)

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def learn(batch):
    for x, y in batch:
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


with lockstep.Run("window", seed=24, replicas=3) as run:
    model = run.model(nn.Linear(8, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    window = run.register("window", Window())
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    train = run.loader(data, batch_size=16, shuffle=True)
    for _epoch in run.epochs(3):
        for batch in run.batches(train):
            window.losses.append(run.mean(learn(batch)))
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * sum(window.losses) / len(window.losses)
