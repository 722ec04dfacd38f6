"""DeepLabV3 on PASCAL VOC 2012: auxiliary loss, polynomial learning rate, mIoU over all images.

    python examples/plain_voc.py --data DIR

DIR has VOCdevkit/VOC2012; without VOC, `python examples/data.py voc DIR --images 400` writes small data.
"""

import argparse
from pathlib import Path
from typing import Any

import cpu_torchvision  # noqa: F401 (for torch without CUDA; not needed with wheels of one build)
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import PolynomialLR
from torch.utils.data import DataLoader
from torchvision import models, tv_tensors
from torchvision.datasets import VOCSegmentation
from torchvision.transforms import v2

CLASSES, IGNORED = 21, 255
BACKBONES = ["resnet101", "resnet50", "mobilenet_v3_large"]


def folder(path: str) -> Path:
    """Return the directory that holds VOC 2012."""
    if not (Path(path) / "VOCdevkit" / "VOC2012").is_dir():
        hint = f"for small data: python examples/data.py voc {path} --images 400"
        raise argparse.ArgumentTypeError(f"no VOCdevkit/VOC2012 in {path}; {hint}")
    return Path(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=folder, default="data/voc", help="has VOCdevkit/VOC2012")
    parser.add_argument("--backbone", choices=BACKBONES, default=BACKBONES[0])
    parser.add_argument("--weights-backbone", help="such as DEFAULT; none: from scratch")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--crop", type=int, default=480, help="in pixels")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=4, help="loader processes per rank")
    parser.add_argument("--channels-last", action="store_true")
    return parser.parse_args()


class Scenes(VOCSegmentation):  # type: ignore[misc] # torchvision has no types
    """VOC's images, shape `(3, crop, crop)`, and their labels, shape `(crop, crop)`."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one image and its labels; an error names the file."""
        try:
            image, labels = super().__getitem__(index)
        except OSError as error:
            raise OSError(f"{self.images[index]} or its mask: {error}") from error
        wrong = labels[(labels >= CLASSES) & (labels != IGNORED)]
        if len(wrong):
            raise ValueError(f"{self.masks[index]}: label {wrong[0]}; expected 0 to 20, or 255")
        return image, labels.squeeze(0).long()


def to_tensors(image: Image.Image, labels: Image.Image) -> tuple[Tensor, Tensor]:
    return tv_tensors.Image(image), tv_tensors.Mask(labels)


def transforms(crop: int, *, augment: bool = False) -> v2.Compose:
    """Return what fits images into `crop`; where they are smaller, the rest is ignored."""
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORED}
    steps = [
        to_tensors,
        v2.ScaleJitter((crop, crop), scale_range=(0.5, 2.0) if augment else (1.0, 1.0)),
        v2.RandomCrop(crop, pad_if_needed=True, fill=fill),
        v2.RandomHorizontalFlip(0.5 if augment else 0.0),
        v2.ToDtype(torch.float32, scale=True),  # the image alone
        v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        v2.ToPureTensor(),
    ]
    return v2.Compose(steps)


def loss_of(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Return the mean over pixels, and half of that of the auxiliary head."""
    target = labels.flatten()  # a list of pixels, since CUDA's loss of images is not deterministic
    main, aux = (output[name].movedim(1, -1).flatten(0, 2) for name in ("out", "aux"))
    loss = F.cross_entropy(main, target, ignore_index=IGNORED)
    return loss + 0.5 * F.cross_entropy(aux, target, ignore_index=IGNORED)


def confusion(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many pixels of each class were taken for each, shape `(CLASSES, CLASSES)`."""
    counts = labels != IGNORED
    pairs = labels[counts] * CLASSES + logits.argmax(1)[counts]
    return torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)


def mean_iou(table: Tensor) -> float:
    """Return the mean intersection over union of the classes that occur."""
    union = table.sum(0) + table.sum(1) - table.diagonal()
    return float((table.diagonal() / union).nanmean())


def build(options: argparse.Namespace) -> Any:
    """Return DeepLabV3 with its auxiliary head."""
    heads = {"num_classes": CLASSES, "aux_loss": True}
    weights = {"weights": None, "weights_backbone": options.weights_backbone}
    model = models.get_model(f"deeplabv3_{options.backbone}", **heads, **weights)
    return model.to(memory_format=torch.channels_last) if options.channels_last else model


def main() -> None:
    options = parse()
    train_set = Scenes(options.data, transforms=transforms(options.crop, augment=True))
    test_set = Scenes(options.data, image_set="val", transforms=transforms(options.crop))
    settings: dict[str, Any] = {"batch_size": options.batch_size, "num_workers": options.workers}
    sgd = {"lr": options.lr, "momentum": 0.9, "weight_decay": 1e-4}

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(train_set, shuffle=True, drop_last=True, **settings)
    test = DataLoader(test_set, **settings)
    model = build(options).to(device)
    optimizer = SGD(model.parameters(), **sgd)
    schedule = PolynomialLR(optimizer, options.epochs * len(loader), power=0.9)

    for _ in range(options.epochs):
        model.train()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            tables = [confusion(model(x.to(device))["out"].cpu(), y) for x, y in test]
        miou = mean_iou(torch.stack(tables).sum(0))
        print(f"mIoU {miou:.2%}")
        torch.save(model.state_dict(), "voc.pt")


if __name__ == "__main__":
    main()
