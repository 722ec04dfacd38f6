"""A script of accelerate with one line changed, its import: handwritten digits.

lockstep run -n 2 accelerated.py        lockstep verify accelerated.py --layouts 1 2 3 "2,kill@9"
"""

import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.integrations.accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(replicas=4)
    set_seed(42)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(train))
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )
    for epoch in range(3):
        model.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        right = 0
        for x, y in test:
            with torch.no_grad():
                found = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            right += int((found[0] == found[1]).sum())
        accelerator.print(f"epoch {epoch}: {right} of {len(labels) - 1500} right")
    accelerator.end_training()


if __name__ == "__main__":
    main()
