"""A language model whose output layer is its embedding."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class TiedModel(nn.Module):
    def __init__(self, vocabulary=32, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens):
        return self.decoder(self.rnn(self.embedding(tokens))[0])


with lockstep.Run("tied", seed=15, replicas=3) as run:
    tokens = torch.arange(700) * 5 % 32
    blocks = tokens[: 70 * 10].view(70, 10)
    train = run.loader(TensorDataset(blocks), batch_size=14, shuffle=True)
    model = run.model(TiedModel())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8))
    for _epoch in run.epochs(4):
        for (block,) in train:
            logits = model(block[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 32), block[:, 1:].reshape(-1))
            optimizer.zero_grad()
            run.backward(loss)
            run.clip_grad_norm_(model, 0.25)
            optimizer.step()
