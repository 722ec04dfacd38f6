"""An autoencoder is trained first; then a classifier on its encoder, which goes on learning."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 4), nn.ReLU())
        self.decoder = nn.Linear(4, 10)
        self.classifier = nn.Linear(4, 2)

    def forward(self, x, rebuild):
        code = self.encoder(x)
        return self.decoder(code) if rebuild else self.classifier(code)


with lockstep.Run("pretrain", seed=32, replicas=3) as run:
    x = torch.randn(72, 10)
    train = run.loader(TensorDataset(x, x.sum(1).gt(0).long()), batch_size=12, shuffle=True)
    model = run.model(Net())
    first = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(2):
        for inputs, _ in train:
            first.zero_grad()
            run.backward(F.mse_loss(model(inputs, rebuild=True), inputs))
            first.step()
    second = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _epoch in run.epochs(2):
        for inputs, labels in train:
            second.zero_grad()
            run.backward(F.cross_entropy(model(inputs, rebuild=False), labels))
            second.step()
