"""A classifier with a function that trains an epoch and one that tests, and options on the command line."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
import lockstep


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc1 = nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.25)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = self.dropout(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class Points(torch.utils.data.Dataset):
    def __init__(self, train=True):
        generator = torch.Generator().manual_seed(1 if train else 2)
        self.points = torch.randn(160 if train else 48, 16, generator=generator)
        self.targets = self.points[:, :4].argmax(1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], int(self.targets[index])


def train(run, args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        run.backward(loss)
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}")
            if args.dry_run:
                # lockstep: question: this leaves a loop whose iterations are not the same on all layouts: count with run.step, and leave between the batches of run.batches
                break


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()  # sum up batch loss
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()

    test_loss /= len(test_loader.dataset)
    print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(test_loader.dataset)}\n")


def main():
    # Training settings
    parser = argparse.ArgumentParser(description="Points")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N")
    parser.add_argument("--test-batch-size", type=int, default=48, metavar="N")
    parser.add_argument("--epochs", type=int, default=3, metavar="N")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--log-interval", type=int, default=2, metavar="N")
    parser.add_argument("--save-model", action="store_true")
    args = parser.parse_args()
    use_cuda = not args.no_cuda and torch.cuda.is_available()

    with lockstep.Run("pair", seed=args.seed, replicas=4) as run:
        if use_cuda:
            device = torch.device("cuda")
        else:
            device = torch.device("cpu")

        train_kwargs = {"batch_size": args.batch_size, "shuffle": True}
        test_kwargs = {"batch_size": args.test_batch_size}
        train_loader = run.loader(torch.utils.data.DataLoader(Points(), **train_kwargs))
        test_loader = torch.utils.data.DataLoader(Points(train=False), **test_kwargs)

        model = run.model(Net().to(device))
        optimizer = run.optimizer(optim.Adadelta(model.parameters(), lr=args.lr))

        scheduler = run.scheduler(StepLR(optimizer, step_size=1, gamma=args.gamma))
        for epoch in run.epochs(args.epochs):
            epoch += 1
            train(run, args, model, device, train_loader, optimizer, epoch)
            test(model, device, test_loader)
            scheduler.step()

        if args.save_model:
            run.export("points.pt", model)


if __name__ == "__main__":
    main()
