"""ReduceLROnPlateau on a validation loss, RMSprop, a held-out part by random_split."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

import lockstep

with lockstep.Run("validated", seed=5, replicas=4) as run:
    x = torch.randn(150, 8)
    full = TensorDataset(x, (x.abs().sum(1) > 6.4).float())
    train_set, valid_set = random_split(full, [100, 50])
    train = run.loader(train_set, batch_size=20, shuffle=True)
    valid = run.loader(valid_set, batch_size=50)
    model = run.model(nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 1), nn.Flatten(0)))
    optimizer = run.optimizer(torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5))
    scheduler = run.scheduler(
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
    )
    for _epoch in run.epochs(5):
        model.train()
        for features, label in train:
            run.backward(F.binary_cross_entropy_with_logits(model(features), label))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            valid_loss = run.mean(
                F.binary_cross_entropy_with_logits(model(features), label, reduction="none")
                for features, label in valid
            )
        scheduler.step(valid_loss)
        run.print(f"{valid_loss:.4f} {optimizer.param_groups[0]['lr']}")
