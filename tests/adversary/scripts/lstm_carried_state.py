"""A character model that carries its hidden state from chunk to chunk: truncated backpropagation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

TEXT, CHUNK, STREAMS = 96, 8, 12


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(26, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.out = nn.Linear(12, 26)

    def forward(self, tokens, state):
        hidden, state = self.lstm(self.embedding(tokens), state)
        return self.out(hidden), state


with lockstep.Run("chars", seed=5, replicas=3) as run:
    text = torch.randint(0, 26, (STREAMS, TEXT + 1))
    train = run.loader(TensorDataset(text), batch_size=STREAMS)
    model = run.model(CharModel())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(2):
        for batch in run.batches(train):
            states = {}
            for start in range(0, TEXT, CHUNK):
                for number, (tokens,) in enumerate(batch):
                    part = tokens[:, start : start + CHUNK + 1]
                    logits, state = model(part[:, :-1], states.get(number))
                    states[number] = tuple(s.detach() for s in state)
                    loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
                    optimizer.zero_grad()
                    run.backward(loss)
                    optimizer.step()
