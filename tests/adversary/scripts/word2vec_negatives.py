"""Skip-gram with negative samples that are drawn in the loop, Adagrad over two embeddings."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep


class Pairs(Dataset):
    def __init__(self):
        text = [(i * i + 3 * i) % 25 for i in range(60)]
        self.pairs = [(text[i], text[j]) for i in range(60) for j in (i - 1, i + 1) if 0 <= j < 60]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.contexts = nn.Embedding(25, 6), nn.Embedding(25, 6)

    def forward(self, word, context, negatives):
        vector = self.words(word)
        positive = (vector * self.contexts(context)).sum(1)
        negative = torch.einsum("bd,bkd->bk", vector, self.contexts(negatives))
        return -(F.logsigmoid(positive) + F.logsigmoid(-negative).sum(1)).mean()


with lockstep.Run("word2vec", seed=12, replicas=3) as run:
    train = run.loader(Pairs(), batch_size=24, shuffle=True)
    model = run.model(SkipGram())
    optimizer = run.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
    frequency = torch.ones(25)
    for _epoch in run.epochs(4):
        for word, context in train:
            negatives = torch.multinomial(frequency, len(word) * 4, replacement=True)
            loss = model(word, context, negatives.view(-1, 4))
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
