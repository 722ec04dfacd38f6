"""AdamW, a cosine per batch, dropout, clipping: the usual recipe for small transformers."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

EPOCHS = 4


def main():
    with lockstep.Run("adamw", seed=7, replicas=3) as run:
        data = TensorDataset(torch.randn(90, 12), torch.randint(0, 5, (90,)))
        train = run.loader(DataLoader(data, batch_size=15, shuffle=True))
        net = nn.Sequential(
            nn.Linear(12, 48), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(48), nn.Linear(48, 5)
        )
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05))
        total = EPOCHS * len(train)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
        scheduler = run.scheduler(cosine)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

        for _epoch in run.epochs(EPOCHS):
            model.train()
            for inputs, targets in train:
                optimizer.zero_grad(set_to_none=True)
                loss = criterion(model(inputs), targets)
                run.backward(loss)
                run.clip_grad_norm_(model, 1.0)
                optimizer.step()
                scheduler.step()
                run.log(loss=loss, lr=scheduler.get_last_lr()[0])


if __name__ == "__main__":
    main()
