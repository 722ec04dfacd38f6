"""Mixed precision with a loss scaler, clipping, a bar, and ReduceLROnPlateau on the validation loss."""

import torch
from torch import nn
from torch.amp import autocast
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm
import lockstep

USE_AMP = torch.cuda.is_available()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def loaders():
    x = torch.randn(180, 6)
    y = (x**2).sum(1, keepdim=True)
    train = run.loader(DataLoader(TensorDataset(x[:150], y[:150]), 30, True))
    valid = DataLoader(TensorDataset(x[150:], y[150:]), 30)
    return train, valid


def fit(net, opt, train, valid, epochs=3):
    plateau = run.scheduler(ReduceLROnPlateau(opt, patience=1))
    loss_fn = nn.MSELoss()
    for epoch in tqdm(run.epochs(epochs), total=epochs):
        net.train()
        for x, y in tqdm(train, leave=False):
            x, y = x.to(DEVICE), y.to(DEVICE)
            opt.zero_grad()
            with autocast(DEVICE.type, enabled=USE_AMP):
                loss = loss_fn(net(x), y)
            run.backward(loss)
            run.clip_grad_norm_(net.parameters(), max_norm=1.0)
            opt.step()
        net.eval()
        with torch.no_grad():
            valid_loss = sum(loss_fn(net(x.to(DEVICE)), y.to(DEVICE)).item() for x, y in valid) / len(valid)
        plateau.step(valid_loss)
        if run.is_main_process:
            torch.save({"epoch": epoch, "net": net.state_dict(), "opt": opt.state_dict()}, "amp.pt")


if __name__ == "__main__":
    with lockstep.Run("amp", seed=11, replicas=4, precision="fp16" if USE_AMP else "fp32") as run:
        train, valid = loaders()
        net = run.model(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1)).to(DEVICE))
        opt = run.optimizer(torch.optim.RMSprop([
            {"params": net[0].parameters(), "lr": 1e-3},
            {"params": net[2].parameters()},
        ], lr=1e-2))
        fit(net, opt, train, valid)
