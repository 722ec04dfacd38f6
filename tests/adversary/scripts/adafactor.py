"""torch's Adafactor on a bag of words: nn.EmbeddingBag, with offsets from a collate function."""

import torch
import torch.nn.functional as F
from torch import nn

import lockstep


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        words = [(index * k) % 50 for k in range(1, 3 + index % 5)]
        return words, index % 3


def collate(samples):
    offsets = torch.tensor([0, *(len(words) for words, _ in samples[:-1])]).cumsum(0)
    words = torch.tensor([word for words, _ in samples for word in words])
    return words, offsets, torch.tensor([label for _, label in samples])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 16, mode="mean")
        self.fc = nn.Linear(16, 3)

    def forward(self, words, offsets):
        return self.fc(self.embedding(words, offsets))


with lockstep.Run("bag", seed=4, replicas=3) as run:
    model = run.model(Bag())
    optimizer = run.optimizer(torch.optim.Adafactor(model.parameters(), lr=0.05))
    train = run.loader(Texts(), batch_size=16, shuffle=True, collate_fn=collate)
    for _epoch in run.epochs(4):
        for words, offsets, labels in train:
            loss = F.cross_entropy(model(words, offsets), labels)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
