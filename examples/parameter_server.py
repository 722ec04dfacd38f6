"""The digits of digits.py with parameter servers: each holds some parameters, and updates them.

    lockstep run -n 2 --servers 2 --strategy ps examples/parameter_server.py
    lockstep run -n 2 --servers 2 --strategy ps examples/parameter_server.py --staleness 2
    python examples/parameter_server.py --staleness 2

Without staleness the weights are those of digits.py. With it, gradients are computed with parameters that
lack exactly so many updates, and a worker waits that much less for the others. The weights are the same on
every layout.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

import lockstep


class Net(nn.Module):
    """Two convolutions with BatchNorm, dropout, one linear layer; input `(batch, 1, 8, 8)`."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, shape `(batch, 10)`."""
        logits: torch.Tensor = self.head(self.features(images))
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
    parser.add_argument("--staleness", type=int, default=0)
    options = parser.parse_args()

    with lockstep.Run("parameter-server", replicas=4, staleness=options.staleness) as run:
        train_set, test_set = load()
        model = run.model(Net())
        # Late gradients overshoot, and act as momentum by themselves: smaller steps, without any.
        lr, momentum = 0.05 / (1 + options.staleness), 0.0 if options.staleness else 0.9
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum))
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
