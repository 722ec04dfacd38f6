"""DistributedDataParallel, started by torchrun: sampler, wrapper, rank 0 prints and saves."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import lockstep


def get_data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(144, 12, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def evaluate(model, loader, device):
    model.eval()
    correct = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            correct[0] += (model(x).argmax(1) == y).sum()
            correct[1] += len(y)
    return (correct[0] / correct[1]).item()


def main(args):
    with lockstep.Run("ddp", seed=42, replicas=4) as run:
        rank = run.world.rank
        device = run.device

        train_set, test_set = get_data(0), get_data(1)
        train_loader = run.loader(DataLoader(train_set, batch_size=args.batch_size * run.replicas, shuffle=True))
        test_loader = DataLoader(test_set, batch_size=args.batch_size)

        model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2)).to(device)
        model = run.model(model)
        loss_fn = nn.CrossEntropyLoss()
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        for epoch in run.epochs(args.epochs):
            model.train()
            for x, y in train_loader:
                x, y = x.to(device), y.to(device)
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                run.backward(loss)
                optimizer.step()
            accuracy = evaluate(model, test_loader, device)
            if rank == 0:
                print(f"epoch {epoch} accuracy {accuracy:.3f}")

        if rank == 0:
            torch.save(model.state_dict(), "ddp.pt")
        run.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=12)
    main(parser.parse_args())
