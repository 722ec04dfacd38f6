"""nn.TransformerEncoder with padding masks and dropout, positions in a buffer, Noam's schedule."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Classifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(20, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 3)
        position = torch.arange(10)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.cat([position.sin(), position.cos()], 1))

    def forward(self, tokens):
        padding = tokens == 0
        x = self.embedding(tokens) * math.sqrt(16) + self.positions
        hidden = self.encoder(x, src_key_padding_mask=padding)
        hidden = hidden.masked_fill(padding[..., None], 0).sum(1)
        return self.out(hidden / (~padding).sum(1, keepdim=True))


def noam(step, warmup=8):
    return min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


with lockstep.Run("encoder", seed=10, replicas=4) as run:
    tokens = torch.randint(1, 20, (72, 10))
    lengths = torch.randint(3, 11, (72, 1))
    tokens[torch.arange(10) >= lengths] = 0
    train = run.loader(TensorDataset(tokens, tokens[:, 0] % 3), batch_size=12, shuffle=True)
    model = run.model(Classifier())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.98)))
    scheduler = run.scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, noam))
    for _epoch in run.epochs(4):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
