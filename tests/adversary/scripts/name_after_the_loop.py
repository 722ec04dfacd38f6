"""What the loop's body assigned last is used after it: printed, logged, and given to a scheduler."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("names", seed=0, replicas=3) as run:
    model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(60, 6), torch.randint(0, 2, (60,)))
    train = run.loader(data, batch_size=12, shuffle=True)
    for epoch in run.epochs(4):
        for i, (inputs, labels) in enumerate(train):
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        print(f"Epoch {epoch + 1}, {i + 1} batches, loss: {loss.item():.4f}")
    print("last outputs", outputs.shape)
