"""random_split without a generator, inside the run; Subset and ConcatDataset; predictions by run.gather."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

import lockstep

with lockstep.Run("split", seed=12, replicas=4) as run:
    x = torch.randn(140, 5)
    everything = TensorDataset(x, (x > 0).sum(1))
    train_set, held_out = random_split(everything, [0.8, 0.2])
    extra = Subset(everything, list(range(0, 28, 2)))
    train = run.loader(ConcatDataset([train_set, extra]), batch_size=21, shuffle=True)
    test = run.loader(held_out, batch_size=14)
    model = run.model(nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 6)))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        model.train()
        for inputs, labels in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            predictions = run.gather(model(inputs).argmax(1) for inputs, _ in test)
        run.print(torch.bincount(predictions, minlength=6).tolist())
