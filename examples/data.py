"""Small data of the form that VOC 2012, CIFAR-10 and ImageNet have on disk, for the examples.

    python examples/data.py voc|cifar10|imagenet DIR --images N

writes N images to train on and a quarter as many to test with. Each class has a hue and a pattern of
stripes, on a grey ground with noise. The same arguments write the same images.
"""

import argparse
import colorsys
import pickle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: How many classes there are to see; of VOC's twenty, the first five.
VOC, CIFAR, IMAGENET = 5, 10, 10
CIFAR_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
#: Label of VOC's outlines, which do not count.
OUTLINE = 255
#: `train` and `val`: a generator for each image.
Sets = dict[str, list[np.random.Generator]]


def draw(
    rng: np.random.Generator, classes: list[int], of: int, width: int, height: int
) -> tuple[Image.Image, Image.Image]:
    """Return an image with an object of each of `classes`, and its labels: 0 ground, class c as c + 1."""
    pixels = np.full((height, width, 3), rng.uniform(60, 190))
    labels = np.zeros((height, width), np.uint8)
    for kind in classes:
        inside, outline = _outline(rng, width, height)
        pixels[inside] = _texture(rng, kind, of, width, height)[inside]
        labels[inside], labels[outline] = kind + 1, OUTLINE
    pixels += rng.normal(0, 12, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.fromarray(labels)


def _outline(
    rng: np.random.Generator, width: int, height: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return where an ellipse or a rectangle of random place and size is, and where its outline."""
    y, x = np.mgrid[:height, :width]
    across = np.abs(x - width * rng.uniform(0.3, 0.7)) / (width * rng.uniform(0.2, 0.4))
    along = np.abs(y - height * rng.uniform(0.3, 0.7)) / (height * rng.uniform(0.2, 0.4))
    distance = np.hypot(across, along) if rng.random() < 0.5 else np.maximum(across, along)
    return distance < 1, (distance >= 1) & (distance < 1 + 8 / max(width, height))


def _texture(
    rng: np.random.Generator, kind: int, of: int, width: int, height: int
) -> NDArray[np.float64]:
    """Return the colours of a class everywhere, shape `(height, width, 3)`."""
    hue = (kind + rng.uniform(-0.25, 0.25)) / of
    colour = np.array(colorsys.hsv_to_rgb(hue % 1, 0.9, rng.uniform(150, 250)))
    y, x = np.mgrid[:height, :width] / max(width, height)
    angle = np.pi * (kind % 4) / 4
    stripes = np.sin(2 * np.pi * 6 * (x * np.cos(angle) + y * np.sin(angle)) + rng.uniform(0, 6))
    return np.asarray(colour * (0.75 + 0.25 * stripes[..., None]))


def write_voc(root: Path, sets: Sets, size: int) -> None:
    """Write what `torchvision.datasets.VOCSegmentation` reads."""
    base = root / "VOCdevkit" / "VOC2012"
    folders = ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass")
    lists, images, masks = (base / name for name in folders)
    for folder in (lists, images, masks):
        folder.mkdir(parents=True)
    for name, generators in sets.items():
        written = []
        for number, rng in enumerate(generators):
            classes = rng.integers(VOC, size=rng.integers(1, 4)).tolist()
            image, labels = draw(rng, classes, VOC, size, size * 3 // 4)
            labels.putpalette(_palette())
            written.append(f"{2007 + list(sets).index(name)}_{number:06d}")
            image.save(images / f"{written[-1]}.jpg", quality=90)
            labels.save(masks / f"{written[-1]}.png")
        (lists / f"{name}.txt").write_text("".join(f"{line}\n" for line in written))
    every = [(lists / f"{name}.txt").read_text() for name in sets]
    (lists / "trainval.txt").write_text("".join(every))


def _palette() -> list[int]:
    """Return VOC's colours: bits of the label, spread over red, green and blue."""
    labels = np.arange(256)
    bits = [[(labels >> (3 * k + c) & 1) << (7 - k) for k in range(3)] for c in range(3)]
    return list(np.array(bits).sum(axis=1).T.flatten().tolist())


def write_cifar10(root: Path, sets: Sets, size: int) -> None:
    """Write the pickled batches that `torchvision.datasets.CIFAR10` reads."""
    base = root / "cifar-10-batches-py"
    base.mkdir(parents=True)
    meta = {"label_names": CIFAR_NAMES.split(), "num_vis": 3 * size * size}
    (base / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    train, test = sets.values()
    parts = {f"data_batch_{k + 1}": train[k::5] for k in range(5)} | {"test_batch": test}
    for name, generators in parts.items():
        labels = [number % CIFAR for number in range(len(generators))]
        drawn = [
            draw(rng, [c], CIFAR, size, size)[0] for rng, c in zip(generators, labels, strict=True)
        ]
        rows = np.stack([np.asarray(image).transpose(2, 0, 1).reshape(-1) for image in drawn])
        batch = {"batch_label": name, "labels": labels, "data": rows}
        (base / name).write_bytes(pickle.dumps(batch, protocol=2))


def write_imagenet(root: Path, sets: Sets, size: int) -> None:
    """Write what `torchvision.datasets.ImageFolder` reads: a folder of JPEGs for each class."""
    for name, generators in sets.items():
        for number, rng in enumerate(generators):
            kind = number % IMAGENET
            folder = root / name / f"n{kind:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            width, height = rng.integers(size * 3 // 4, size + 1, 2).tolist()
            image, _ = draw(rng, [kind], IMAGENET, width, height)
            image.save(folder / f"{folder.name}_{number}.JPEG", quality=90)


def main() -> None:
    writers = {"voc": write_voc, "cifar10": write_cifar10, "imagenet": write_imagenet}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("form", choices=writers)
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--images", metavar="N", type=int, required=True, help="to train on")
    parser.add_argument(
        "--size", type=int, default=128, help="of the longer side, in pixels; CIFAR-10: 32"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.images < 10:
        parser.error(
            f"--images {options.images}; expected at least 10, one of each class of CIFAR-10"
        )
    if options.directory.exists() and any(options.directory.iterdir()):
        parser.error(f"{options.directory} is not empty; expected a new directory")

    counts = (options.images, max(options.images // 4, 10))
    rng, seed = np.random.default_rng, options.seed
    train, val = ([rng((seed, k, i)) for i in range(n)] for k, n in enumerate(counts))
    size = 32 if options.form == "cifar10" else options.size
    writers[options.form](options.directory, {"train": train, "val": val}, size)
    print(f"{counts[0]} and {counts[1]} images in {options.directory}")


if __name__ == "__main__":
    main()
