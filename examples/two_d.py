"""The digits of digits.py in two dimensions: models beside each other, each spread over ranks.

Start it with `lockstep run -n 4 --mesh 2x2`: two models, and two ranks that share the matrices of each.
With `python` it is one model on one rank; weights differ by rounding.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import Dataset, TensorDataset, random_split

import lockstep


class Net(nn.Module):
    """Two linear layers, of which each rank has a part; input `(batch, 1, 8, 8)`."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, shape `(batch, 10)`."""
        logits: torch.Tensor = self.head(F.relu(self.wide(images.flatten(1))))
        return logits


def load() -> list[Dataset[tuple[torch.Tensor, ...]]]:
    """Return the scans as a training set and a test set of every fifth part."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    split = torch.Generator().manual_seed(0)
    return list(random_split(dataset, [0.8, 0.2], generator=split))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    with lockstep.Run("two-d", seed=0, replicas=4, strategy="tensor", exact=False) as run:
        train_set, test_set = load()
        plan = {"wide": ColwiseParallel(), "head": RowwiseParallel()}
        model = run.model(Net(), plan=plan)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        train = run.loader(train_set, batch_size=64, shuffle=True)
        test = run.loader(test_set, batch_size=256)

        for _ in run.epochs(options.epochs):
            model.train()
            for images, labels in train:
                loss = F.cross_entropy(model(images), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)

            model.eval()
            with torch.no_grad():
                accuracy = run.mean(model(x).argmax(1) == y for x, y in test)
            run.print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
