"""An image folder on disk, as ImageNet lies there; torchvision's random transforms, a ResNet block."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tests import vision  # noqa: F401 (lets a CPU build of torch import torchvision)
from torch import nn
from torchvision import datasets, transforms
from torchvision.models.resnet import BasicBlock

import lockstep


def prepare(root):
    rng = np.random.default_rng(0)
    for label in ("cat", "dog", "fox"):
        (root / label).mkdir(parents=True, exist_ok=True)
        for i in range(16):
            pixels = rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{i}.png")


with lockstep.Run("folder", seed=8, replicas=4) as run:
    root = Path("images")
    with run.main_process_first():
        if not root.exists():
            prepare(root)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(16),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.2, 0.2),
            transforms.ToTensor(),
        ]
    )
    train = run.loader(
        datasets.ImageFolder(root, transform), batch_size=8, shuffle=True, num_workers=1
    )
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), BasicBlock(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    model = run.model(net.to(memory_format=torch.channels_last))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for _epoch in run.epochs(3):
        for images, labels in train:
            images = images.to(memory_format=torch.channels_last)
            run.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
