"""Batches of lines of like lengths by a batch sampler: of several sizes, one of a single sample."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Lines(Dataset):
    def __len__(self):
        return 71

    def __getitem__(self, index):
        line = torch.randint(1, 20, (2 + index * index % 11,))
        return line, line.sum() % 3


class Buckets:
    """Batches of at most `tokens` tokens, shuffled."""

    def __init__(self, lengths, tokens):
        self.lengths, self.tokens = lengths, tokens
        self.count = len(self.cut(range(len(lengths))))

    def cut(self, order):
        batches, longest = [[]], 0
        for index in sorted(order, key=self.lengths.__getitem__):
            longest = max(longest, self.lengths[index])
            if batches[-1] and longest * (len(batches[-1]) + 1) > self.tokens:
                batches, longest = [*batches, []], self.lengths[index]
            batches[-1].append(index)
        return batches

    def __len__(self):
        return self.count

    def __iter__(self):
        order = list(range(len(self.lengths)))
        random.shuffle(order)
        batches = self.cut(order)
        return iter([batches[i] for i in torch.randperm(len(batches)).tolist()])


def collate(pairs):
    lines, labels = zip(*pairs, strict=True)
    return nn.utils.rnn.pad_sequence(lines, batch_first=True), torch.stack(labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, ids):
        return self.out(F.dropout(self.embedding(ids).sum(1), 0.1))


with lockstep.Run("buckets", seed=1, replicas=4) as run:
    model = run.model(Net())
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    lengths = [2 + index * index % 11 for index in range(71)]
    buckets = Buckets([*lengths[:70], 36], tokens=48)
    train = run.loader(DataLoader(Lines(), batch_sampler=buckets, collate_fn=collate))
    assert len(train) == len(buckets) == 12
    sizes = run.loader(Lines(), batch_sampler=buckets, collate_fn=collate, num_workers=1)
    for epoch in run.epochs(3):
        for ids, labels in train if epoch != 1 else sizes:
            run.backward(F.cross_entropy(model(ids), labels))
            optimizer.step()
            optimizer.zero_grad()
    assert run.sum(torch.ones(len(labels)) for _, labels in train) == 71
