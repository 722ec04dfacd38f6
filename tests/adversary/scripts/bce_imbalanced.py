"""An imbalanced binary task: pos_weight, WeightedRandomSampler, a threshold metric of several parts."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import lockstep

with lockstep.Run("imbalanced", seed=17, replicas=4) as run:
    x = torch.randn(160, 6)
    y = (x[:, 0] + x[:, 1] > 1.5).float()
    dataset = TensorDataset(x, y)
    weights = torch.where(y > 0, 5.0, 1.0)
    sampler = WeightedRandomSampler(weights, num_samples=100, replacement=True)
    train = run.loader(DataLoader(dataset, batch_size=20, sampler=sampler))
    test = run.loader(dataset, batch_size=64)
    model = run.model(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1), nn.Flatten(0)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))

    def scores():
        for features, label in test:
            positive = model(features) > 0
            yield {"accuracy": positive == (label > 0), "positives": positive.float()}

    for _epoch in run.epochs(4):
        model.train()
        for features, label in train:
            optimizer.zero_grad()
            run.backward(criterion(model(features), label))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            result = run.mean(scores())
        run.print({name: round(value, 3) for name, value in result.items()})
