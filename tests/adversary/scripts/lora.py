"""LoRA: pretrained weights are written to a file, loaded and frozen; adapters learn."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class LoRA(nn.Module):
    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / 10)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + F.dropout(x, 0.1, self.training) @ self.down.T @ self.up.T


def base():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


with lockstep.Run("lora", seed=17, replicas=3) as run:
    pretrained, net = base(), base()
    with run.main_process_first():
        if run.is_main_process:
            torch.save(pretrained.state_dict(), "pretrained.pt")
    net.load_state_dict(torch.load("pretrained.pt", weights_only=True))
    model = run.model(nn.Sequential(LoRA(net[0]), nn.ReLU(), LoRA(net[2])))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = run.optimizer(torch.optim.AdamW(trainable, lr=0.02))
    data = TensorDataset(torch.randn(72, 8), torch.randint(0, 3, (72,)))
    train = run.loader(data, batch_size=12, shuffle=True)
    for _epoch in run.epochs(4):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
