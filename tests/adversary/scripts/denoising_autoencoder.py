"""A convolutional denoising autoencoder: noise is added in the loop, outputs are sampled between epochs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1))
decoder = nn.Sequential(
    nn.ConvTranspose2d(8, 4, 2, 2), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, 2), nn.Sigmoid()
)

with lockstep.Run("denoise", seed=7, replicas=4) as run:
    model = run.model(nn.Sequential(encoder, decoder))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=5e-3))
    train = run.loader(TensorDataset(torch.rand(64, 1, 8, 8)), batch_size=16, shuffle=True)
    for epoch in run.epochs(6):
        for (image,) in train:
            noisy = image + 0.3 * torch.randn_like(image)
            loss = F.mse_loss(model(noisy), image)
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        with torch.no_grad():
            sample = model(torch.rand(1, 1, 8, 8))
        run.print(f"epoch {epoch}: mean pixel {sample.mean():.4f}")
