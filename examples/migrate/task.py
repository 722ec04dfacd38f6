"""The model and the data that all loops in this directory train with."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split


class Net(nn.Module):
    """One hidden layer and dropout; input `(batch, 64)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.25), nn.Linear(256, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, shape `(batch, 10)`."""
        logits: torch.Tensor = self.layers(images)
        return logits


def load() -> list[Dataset[tuple[torch.Tensor, ...]]]:
    """Return scikit-learn's handwritten digits as a training set and a test set."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return list(random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0)))
