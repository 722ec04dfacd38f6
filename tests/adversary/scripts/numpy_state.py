"""A registered object whose state is a NumPy array and a set: class counts that weigh the loss."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Counts:
    def __init__(self, classes):
        self.counts = np.ones(classes)

    def state_dict(self):
        return {"counts": self.counts.tolist()}

    def load_state_dict(self, state):
        self.counts = np.array(state["counts"])


with lockstep.Run("counts", seed=7, replicas=3) as run:
    y = torch.randint(0, 12, (72,)) // 4
    data = TensorDataset(torch.randn(72, 5), y)
    train = run.loader(data, batch_size=12, shuffle=True)
    model = run.model(nn.Linear(5, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    counts = run.register("counts", Counts(3))
    for _epoch in run.epochs(4):
        weight = torch.tensor(counts.counts.sum() / counts.counts, dtype=torch.float32)
        for x, labels in train:
            loss = F.cross_entropy(model(x), labels, weight=weight)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        with torch.no_grad():
            seen = run.sum(F.one_hot(model(x).argmax(1), 3) for x, _ in train)
        counts.counts += np.asarray(seen)
