"""A U-Net with skip connections, InstanceNorm with running statistics and a soft Dice loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep


class Discs(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        grid = torch.stack(torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij"))
        center = torch.randint(3, 9, (2, 1, 1))
        mask = ((grid - center).square().sum(0) < 9).float()
        return (mask + 0.5 * torch.randn(12, 12))[None], mask[None]


def block(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.InstanceNorm2d(after, affine=True, track_running_stats=True),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.up1 = block(1, 4), block(4, 8), block(12, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        up = F.interpolate(second, scale_factor=2, mode="bilinear")
        return self.out(self.up1(torch.cat([first, up], 1)))


with lockstep.Run("unet", seed=25, replicas=4) as run:
    train = run.loader(Discs(), batch_size=8, shuffle=True)
    model = run.model(UNet())
    optimizer = run.optimizer(torch.optim.NAdam(model.parameters(), lr=0.01))
    for _epoch in run.epochs(4):
        for images, masks in train:
            p = model(images).sigmoid()
            overlap = (p * masks).sum((1, 2, 3))
            dice = 1 - (2 * overlap + 1) / ((p + masks).sum((1, 2, 3)) + 1)
            optimizer.zero_grad()
            run.backward(dice.mean())
            optimizer.step()
