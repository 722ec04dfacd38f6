"""Two phases: the evaluation between them chooses the learning rate of the second."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("phases", seed=2, replicas=3) as run:
    x = torch.randn(72, 5)
    data = TensorDataset(x, x.argmax(1))
    model = run.model(nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 5)))
    train = run.loader(data, batch_size=12, shuffle=True)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    def train_epochs(count):
        for _epoch in run.epochs(count):
            for inputs, labels in train:
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()

    train_epochs(2)
    with torch.no_grad():
        accuracy = run.mean(model(inputs).argmax(1) == labels for inputs, labels in train)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * (1 - accuracy)
    train_epochs(2)
    run.print(f"accuracy after the first phase: {accuracy:.3f}")
