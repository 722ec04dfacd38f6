"""Cross-validation: a run for each fold, one after the other in one script."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(0)
x = torch.randn(90, 6, generator=generator)
dataset = TensorDataset(x, x[:, 0].gt(0).long())

scores = []
for fold in range(3):
    with lockstep.Run(f"fold-{fold}", seed=fold, replicas=3) as run:
        train = run.loader(
            Subset(dataset, [i for i in range(90) if i % 3 != fold]), batch_size=12, shuffle=True
        )
        test = run.loader(Subset(dataset, range(fold, 90, 3)), batch_size=30)
        model = run.model(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
        for _epoch in run.epochs(4):
            for inputs, labels in train:
                run.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            scores.append(run.mean(model(a).argmax(1) == b for a, b in test))
        run.print(f"fold {fold}: {scores[-1]:.3f}")
