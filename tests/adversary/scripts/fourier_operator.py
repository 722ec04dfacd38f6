"""A Fourier layer with complex weights, PReLU, a Sobolev loss."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class Spectral(nn.Module):
    def __init__(self, width=4, modes=5):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum(
            "bim,iom->bom", spectrum[..., : self.modes], self.weight
        )
        return torch.fft.irfft(out, n=x.shape[-1])


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.drop = nn.Conv1d(1, 4, 1), nn.Conv1d(4, 1, 1)
        self.spectral, self.act = Spectral(), nn.PReLU()

    def forward(self, x):
        x = self.lift(x)
        return self.drop(self.act(self.spectral(x) + x))


with lockstep.Run("fno", seed=31, replicas=4) as run:
    x = torch.randn(64, 1, 16).cumsum(2) / 4
    train = run.loader(TensorDataset(x, x.roll(2, 2)), batch_size=16, shuffle=True)
    model = run.model(Operator())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(5):
        for inputs, target in train:
            error = model(inputs) - target
            loss = error.square().mean() + 0.1 * error.diff(dim=2).square().mean()
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
