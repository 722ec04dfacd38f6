"""A Trainer that keeps model, optimizer and loaders, and remembers the best epoch."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
import lockstep


@dataclass
class Config:
    epochs: int = 3
    batch_size: int = 24
    lr: float = 3e-3
    grad_norm_clip: float = 1.0
    checkpoint: str = "best.pt"


class Regressor(nn.Sequential):
    def __init__(self, width=32):
        super().__init__(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))


class Trainer:
    def __init__(self, model, train_dataset, valid_dataset, config):
        self.config = config
        self.device = "cpu"
        if torch.cuda.is_available():
            self.device = torch.cuda.current_device()
        self.model = run.model(model.to(self.device))
        self.optimizer = self.configure_optimizer()
        self.train_loader = run.loader(DataLoader(
            train_dataset,
            batch_size=config.batch_size,
            shuffle=True,  # a new order in each epoch
        ))
        self.valid_loader = DataLoader(valid_dataset, batch_size=config.batch_size)
        self.criterion = nn.MSELoss()
        self.best = float("inf")

    def configure_optimizer(self):
        return run.optimizer(torch.optim.AdamW(self.model.parameters(), lr=self.config.lr))

    def training_step(self, batch):
        inputs, targets = (part.to(self.device) for part in batch)
        loss = self.criterion(self.model(inputs).squeeze(1), targets)
        self.optimizer.zero_grad(set_to_none=True)
        run.backward(loss)
        run.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.optimizer.step()
        return loss.item()

    def run_epoch(self):
        self.model.train()
        losses = []
        for batch in self.train_loader:
            losses.append(self.training_step(batch))
        return sum(losses) / len(losses)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total, count = 0.0, 0
        for inputs, targets in self.valid_loader:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            total += self.criterion(self.model(inputs).squeeze(1), targets).item() * len(inputs)
            count += len(inputs)
        return total / count

    def save_checkpoint(self):
        run.export(self.config.checkpoint, self.model)

    def fit(self):
        for epoch in run.epochs(self.config.epochs):
            train_loss = self.run_epoch()
            valid_loss = self.validate()
            print(f"epoch {epoch}: train {train_loss:.4f} valid {valid_loss:.4f}")
            if valid_loss < self.best:
                self.best = valid_loss
                self.save_checkpoint()


def make_data():
    x = torch.randn(200, 8)
    return random_split(TensorDataset(x, x.sin().sum(1)), [150, 50])


if __name__ == "__main__":
    with lockstep.Run("trainer", seed=3407, replicas=4) as run:
        train_dataset, valid_dataset = make_data()
        trainer = Trainer(Regressor(), train_dataset, valid_dataset, Config())
        trainer.fit()
