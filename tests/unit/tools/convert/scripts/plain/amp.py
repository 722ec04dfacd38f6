"""Mixed precision with a loss scaler, clipping, a bar, and ReduceLROnPlateau on the validation loss."""

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm, trange

USE_AMP = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def loaders():
    x = torch.randn(180, 6)
    y = (x**2).sum(1, keepdim=True)
    train = DataLoader(TensorDataset(x[:150], y[:150]), 30, True)
    valid = DataLoader(TensorDataset(x[150:], y[150:]), 30)
    return train, valid


def fit(net, opt, train, valid, epochs=3):
    scaler = GradScaler(DEVICE.type, enabled=USE_AMP)
    plateau = ReduceLROnPlateau(opt, patience=1)
    loss_fn = nn.MSELoss()
    for epoch in trange(epochs):
        net.train()
        for x, y in tqdm(train, leave=False):
            x, y = x.to(DEVICE), y.to(DEVICE)
            opt.zero_grad()
            with autocast(DEVICE.type, enabled=USE_AMP):
                loss = loss_fn(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(opt)
            scaler.update()
        net.eval()
        with torch.no_grad():
            valid_loss = sum(loss_fn(net(x.to(DEVICE)), y.to(DEVICE)).item() for x, y in valid) / len(valid)
        plateau.step(valid_loss)
        torch.save({"epoch": epoch, "net": net.state_dict(), "opt": opt.state_dict()}, "amp.pt")


if __name__ == "__main__":
    torch.manual_seed(11)
    train, valid = loaders()
    net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1)).to(DEVICE)
    opt = torch.optim.RMSprop([
        {"params": net[0].parameters(), "lr": 1e-3},
        {"params": net[2].parameters()},
    ], lr=1e-2)
    fit(net, opt, train, valid)
