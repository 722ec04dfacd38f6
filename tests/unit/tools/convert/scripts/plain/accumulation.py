"""A small language model on text that is made here: gradients of several batches, warm-up, clipping."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

# hyperparameters
block_size = 16
batch_size = 8
gradient_accumulation_steps = 4
max_epochs = 2
learning_rate = 3e-3
grad_clip = 1.0
device = "cuda:0" if torch.cuda.is_available() else "cpu"


class Text(Dataset):
    def __init__(self, length=1100):
        self.data = torch.tensor([(i * i + i // 7) % 26 for i in range(length)])

    def __len__(self):
        return (len(self.data) - 1) // block_size

    def __getitem__(self, index):
        chunk = self.data[index * block_size : (index + 1) * block_size + 1]
        return chunk[:-1], chunk[1:]


class Model(nn.Module):
    def __init__(self, vocabulary=26, width=24):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, idx, targets=None):
        hidden, _ = self.rnn(self.embedding(idx))
        logits = self.head(hidden)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def build():
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    return model, optimizer


def main():
    torch.manual_seed(1337)
    loader = DataLoader(Text(), batch_size=batch_size, shuffle=True, drop_last=True)
    model, optimizer = build()
    total = max_epochs * len(loader) // gradient_accumulation_steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step / max(total, 1), 1)))
    )

    model.train()
    for epoch in range(max_epochs):
        optimizer.zero_grad(set_to_none=True)
        for step, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps  # scale the loss
            loss.backward()
            if (step + 1) % gradient_accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
        print(f"epoch {epoch}: loss {loss.item() * gradient_accumulation_steps:.4f}")


if __name__ == "__main__":
    main()
