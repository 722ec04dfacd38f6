"""CIFAR-10 and the small network of PyTorch's tutorial, with a bar.

    lockstep run -n 2 examples/cifar10.py --data DIR

DIR has cifar-10-batches-py; without CIFAR-10, `python examples/data.py cifar10 DIR --images 2000` writes
small data, on which 99 % of the test images are right after 10 epochs.
"""

import argparse
from pathlib import Path
from typing import Any, ClassVar

import cpu_torchvision  # noqa: F401 (for torch without CUDA; not needed with wheels of one build)
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.datasets import CIFAR10
from torchvision.transforms import v2

import lockstep


def folder(path: str) -> Path:
    """Return the directory that holds CIFAR-10."""
    if not (Path(path) / "cifar-10-batches-py").is_dir():
        hint = f"for small data: python examples/data.py cifar10 {path} --images 2000"
        raise argparse.ArgumentTypeError(f"no cifar-10-batches-py in {path}; {hint}")
    return Path(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--data", type=folder, default="data/cifar10", help="has cifar-10-batches-py")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=0.005)
    add("--workers", type=int, default=0, help="loader processes per rank")
    return parser.parse_args()


class Images(CIFAR10):  # type: ignore[misc] # torchvision has no types
    """CIFAR-10's images and labels, whether or not the files are those of the original.

    torchvision compares checksums with the original's. The files are pickles: use only those you trust.
    """

    train_list: ClassVar = [[name, None] for name, _ in CIFAR10.train_list]
    test_list: ClassVar = [[name, None] for name, _ in CIFAR10.test_list]
    meta: ClassVar = {**CIFAR10.meta, "md5": None}

    def __init__(self, root: Path, **settings: Any) -> None:
        super().__init__(root, **settings)
        files = self.train_list if self.train else self.test_list
        for index, label in enumerate(self.targets):
            if not 0 <= label < len(self.classes):
                file = root / self.base_folder / files[index * len(files) // len(self)][0]
                raise ValueError(f"{file}: label {label} of image {index}; expected 0 to 9")


class Net(nn.Module):
    """Two convolutions and three linear layers; input `(batch, 3, 32, 32)`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, shape `(batch, 10)`."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        logits: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return logits


def main() -> None:
    options = parse()
    scale = v2.Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    prepare = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), scale])
    train_set = Images(options.data, train=True, transform=prepare)
    test_set = Images(options.data, train=False, transform=prepare)
    settings: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers}

    with lockstep.Run("cifar10", seed=0, replicas=4) as run:
        loader = run.loader(train_set, shuffle=True, **settings)
        test = run.loader(test_set, **settings)
        model = run.model(Net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), options.lr, momentum=0.9))

        for _ in run.epochs(options.epochs):
            for images, labels in loader:
                loss = F.cross_entropy(model(images), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)  # shown on the run's own bar

            with torch.no_grad():
                accuracy = run.mean(model(images).argmax(1) == labels for images, labels in test)
            run.print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
