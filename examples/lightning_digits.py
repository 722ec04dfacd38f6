"""`lightning.Trainer` through a run: handwritten digits, with logs, checkpoints and early stopping.

lockstep run -n 2 lightning_digits.py     lockstep verify lightning_digits.py --layouts 1 2 3 "2,kill@9"
"""

import cpu_torchvision  # noqa: F401 (torchmetrics imports torchvision where it is installed)
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.integrations.lightning import LockstepStrategy


class Digits(L.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(576, 10),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("right", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    L.seed_everything(42)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=64, shuffle=True)
    test = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=99)
    trainer = L.Trainer(
        max_epochs=3,
        strategy=LockstepStrategy(replicas=4),  # 16 images of each batch for each replica
        callbacks=[
            ModelCheckpoint(monitor="right", mode="max"),
            EarlyStopping(monitor="right", mode="max", patience=2),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    model = Digits()
    trainer.fit(model, train, test)
    results = trainer.validate(model, test, ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        print(f"{results[0]['right']:.4f} of the test digits are right")


if __name__ == "__main__":
    main()
