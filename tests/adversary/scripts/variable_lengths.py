"""Sentences of unequal length, padded by a collate function; an LSTM reads them packed."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset

import lockstep


class Sentences(Dataset):
    def __len__(self):
        return 75

    def __getitem__(self, index):
        length = 3 + index % 6
        words = (torch.arange(length) * (index + 3)) % 30 + 1
        return words, index % 2


def collate(samples):
    words, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(w) for w in words])
    return pad_sequence(words, batch_first=True), lengths, torch.tensor(labels)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(16, 2)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(
            self.embedding(words), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.out(hidden[-1])


with lockstep.Run("sentences", seed=4, replicas=3) as run:
    train = run.loader(Sentences(), batch_size=15, shuffle=True, collate_fn=collate)
    model = run.model(Reader())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        for words, lengths, labels in train:
            loss = F.cross_entropy(model(words, lengths), labels)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
