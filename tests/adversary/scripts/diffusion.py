"""A small DDPM: random timesteps and noise per sample; samples are drawn between epochs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

T = 10
alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.3, T), 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 16)
        self.first, self.last = nn.Linear(2, 16), nn.Linear(16, 2)

    def forward(self, x, t):
        return self.last(F.silu(self.first(x) + self.time(t)))


@torch.no_grad()
def sample(model, count):
    x = torch.randn(count, 2)
    for t in reversed(range(T)):
        noise = model(x, torch.full((count,), t))
        x = x - 0.1 * noise + 0.01 * torch.randn_like(x)
    return x


with lockstep.Run("ddpm", seed=15, replicas=4) as run:
    data = TensorDataset(torch.randn(96, 2) * 0.2 + torch.tensor([1.0, -1.0]))
    train = run.loader(data, batch_size=16, shuffle=True)
    model = run.model(Denoiser())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for epoch in run.epochs(4):
        for (x,) in train:
            t = torch.randint(0, T, (len(x),))
            noise = torch.randn_like(x)
            scale = alphas[t][:, None]
            noisy = scale.sqrt() * x + (1 - scale).sqrt() * noise
            optimizer.zero_grad()
            run.backward(F.mse_loss(model(noisy, t), noise))
            optimizer.step()
        run.print(epoch, sample(model, 8).mean(0).tolist())
