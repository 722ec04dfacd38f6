"""A sampler of the script's own that is told the epoch, and orders by length with noise."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import lockstep


class Lines(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        length = 2 + index * 7 % 9
        return {"ids": torch.arange(length) % 12, "label": index % 2, "name": f"line-{index}"}


class Bucketed(Sampler):
    def __init__(self, dataset):
        self.dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        noise = torch.rand(len(self), generator=torch.Generator().manual_seed(self.epoch))
        lengths = torch.tensor([2 + i * 7 % 9 for i in range(len(self))])
        return iter((lengths + 3 * noise).argsort().tolist())


def collate(samples):
    longest = max(len(s["ids"]) for s in samples)
    ids = torch.stack([F.pad(s["ids"], (0, longest - len(s["ids"]))) for s in samples])
    names = [s["name"] for s in samples]
    return {"ids": ids, "label": torch.tensor([s["label"] for s in samples]), "names": names}


with lockstep.Run("bucketed", seed=29, replicas=3) as run:
    dataset = Lines()
    sampler = Bucketed(dataset)
    train = run.loader(DataLoader(dataset, batch_size=12, sampler=sampler, collate_fn=collate))
    model = run.model(nn.EmbeddingBag(12, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for epoch in run.epochs(4):
        sampler.set_epoch(epoch)
        for batch in train:
            assert all(name.startswith("line-") for name in batch["names"])
            run.backward(F.cross_entropy(model(batch["ids"]), batch["label"]))
            optimizer.step()
            optimizer.zero_grad()
