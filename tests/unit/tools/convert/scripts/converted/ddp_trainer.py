import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
import lockstep


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(
        self,
        run,
        model: torch.nn.Module,
        train_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        gpu_id: int,
        save_every: int,
    ) -> None:
        self.run = run
        self.gpu_id = gpu_id
        self.model = model.to(run.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.model = model

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        self.run.backward(loss)
        self.optimizer.step()

    def _run_epoch(self, epoch):
        print(f"[GPU{self.gpu_id}] Epoch {epoch} | Steps: {len(self.train_data)}")
        for source, targets in self.train_data:
            source = source.to(self.run.device)
            targets = targets.to(self.run.device)
            self._run_batch(source, targets)

    def _save_checkpoint(self, epoch):
        ckp = self.model.state_dict()
        torch.save(ckp, "checkpoint.pt")
        print(f"Epoch {epoch} | Training checkpoint saved at checkpoint.pt")

    def train(self, max_epochs: int):
        for epoch in self.run.epochs(max_epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


def load_train_objs(run):
    train_set = MyTrainDataset(128)  # load your dataset
    model = run.model(torch.nn.Linear(20, 1))  # load your model
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    return train_set, model, optimizer


def prepare_dataloader(run, dataset: Dataset, batch_size: int):
    return DataLoader(
        dataset,
        batch_size=batch_size * run.replicas,
        pin_memory=False,
        shuffle=True,
    )


def main(world_size: int, save_every: int, total_epochs: int, batch_size: int):
    with lockstep.Run("ddp_trainer", seed=0, replicas=4) as run:
        rank = run.world.rank
        dataset, model, optimizer = load_train_objs(run)
        train_data = run.loader(prepare_dataloader(run, dataset, batch_size))
        trainer = Trainer(run, model, train_data, optimizer, rank, save_every)
        trainer.train(total_epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total-epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--batch-size", default=8, type=int)
    args = parser.parse_args()

    world_size = torch.cuda.device_count()
    main(world_size, args.save_every, args.total_epochs, args.batch_size)
