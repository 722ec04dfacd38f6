"""A variational autoencoder: noise is drawn in forward, the weight of KL grows with the step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(20, 16)
        self.mu, self.logvar = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x):
        hidden = F.relu(self.encoder(x))
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        z = mu + torch.randn_like(mu) * (logvar / 2).exp()
        return self.decoder(z), mu, logvar


def elbo(model, x, beta):
    decoded, mu, logvar = model(x)
    rebuilt = F.binary_cross_entropy_with_logits(decoded, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1)
    return rebuilt + beta * kl


with lockstep.Run("vae", seed=0, replicas=4) as run:
    data = TensorDataset((torch.rand(96, 20) > 0.6).float())
    train = run.loader(data, batch_size=16, shuffle=True)
    model = run.model(VAE())
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=5e-3))
    for epoch in run.epochs(4):
        model.train()
        for (x,) in train:
            loss = elbo(model, x, beta=min(1.0, run.step / 12)).mean()
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            bound = run.mean(elbo(model, x, 1.0) for (x,) in train)
        run.print(f"epoch {epoch}: {bound:.3f}")
