import argparse
import os
import shutil
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
import lockstep

parser = argparse.ArgumentParser(description="Image Training")
parser.add_argument("-j", "--workers", default=0, type=int, metavar="N")
parser.add_argument("--epochs", default=3, type=int, metavar="N")
parser.add_argument("--start-epoch", default=0, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=32, type=int, metavar="N")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("-p", "--print-freq", default=2, type=int)
parser.add_argument("--resume", default="", type=str, metavar="PATH")
parser.add_argument("-e", "--evaluate", dest="evaluate", action="store_true")
parser.add_argument("--seed", default=None, type=int)

best_acc1 = 0


class Images(Dataset):
    """Images that are noise around one of five patterns."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 5
        patterns = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        self.images = patterns[self.labels] + torch.randn(count, 3, 12, 12, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if torch.rand(()) < 0.5:  # a random flip
            image = image.flip(2)
        return image, self.labels[index]


class SmallNet(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 6 * 6, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(x.flatten(1))


def main():
    global best_acc1
    args = parser.parse_args()

    if args.seed is not None:
        torch.manual_seed(args.seed)

    if torch.cuda.is_available():
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")

    with lockstep.Run("imagenet", seed=args.seed or 0, replicas=4) as run:
        # create model
        model = SmallNet()
        model.fc = nn.Linear(8 * 6 * 6, 5)
        model = run.model(model.to(device))

        # define loss function (criterion), optimizer, and learning rate scheduler
        criterion = nn.CrossEntropyLoss().to(device)

        optimizer = run.optimizer(torch.optim.SGD(
            model.parameters(),
            args.lr,
            momentum=0.9,
            weight_decay=1e-4,
        ))

        """Sets the learning rate to the initial LR decayed by 10 every 2 epochs"""
        scheduler = run.scheduler(StepLR(optimizer, step_size=2, gamma=0.1))

        # optionally resume from a checkpoint
        if args.resume:
            if os.path.isfile(args.resume):
                checkpoint = torch.load(args.resume, map_location=device)
                args.start_epoch = checkpoint["epoch"]
                best_acc1 = checkpoint["best_acc1"]
                model.load_state_dict(checkpoint["state_dict"])
                optimizer.load_state_dict(checkpoint["optimizer"])
                scheduler.load_state_dict(checkpoint["scheduler"])
                print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")

        # Data loading code
        train_loader = run.loader(DataLoader(
            Images(160, 1), batch_size=args.batch_size, shuffle=True,
            num_workers=args.workers, pin_memory=torch.cuda.is_available()))

        val_loader = DataLoader(
            Images(50, 2), batch_size=args.batch_size, shuffle=False,
            num_workers=args.workers, pin_memory=torch.cuda.is_available())

        if args.evaluate:
            validate(val_loader, model, criterion, device, args)
            return

        # lockstep: question: a run that continues after a crash counts epochs by itself, and this start comes from a file that may be another one then: let the number of epochs be the same at each launch
        for epoch in run.epochs(args.epochs - args.start_epoch):
            epoch += args.start_epoch
            # train for one epoch
            train(run, train_loader, model, criterion, optimizer, epoch, device, args)

            # evaluate on validation set
            acc1 = validate(val_loader, model, criterion, device, args)

            scheduler.step()

            # remember best acc@1 and save checkpoint
            is_best = acc1 > best_acc1
            best_acc1 = max(acc1, best_acc1)

            save_checkpoint(run, {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }, is_best)


def train(run, train_loader, model, criterion, optimizer, epoch, device, args):
    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")

    # switch to train mode
    model.train()

    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        # move data to the same device as model
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        # compute output
        output = model(images)
        loss = criterion(output, target)

        # measure accuracy and record loss
        acc1, _ = accuracy(output, target, topk=(1, 3))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))

        # compute gradient and do SGD step
        optimizer.zero_grad()
        run.backward(loss)
        optimizer.step()

        # measure elapsed time
        batch_time.update(time.time() - end)
        end = time.time()

        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i + 1}/{len(train_loader)}]", batch_time, losses, top1, sep="\t")


def validate(val_loader, model, criterion, device, args):
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0][0].item(), images.size(0))
    print(f" * Acc@1 {top1.avg:.3f} Loss {losses.avg:.4f}")
    return top1.avg


def save_checkpoint(run, state, is_best, filename="checkpoint.pth.tar"):
    if run.is_main_process:
        torch.save(state, filename)
    if is_best:
        if run.is_main_process:
            shutil.copyfile(filename, "model_best.pth.tar")


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1,)):
    """Computes the accuracy over the k top predictions for the specified values of k"""
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True) * 100 / target.size(0) for k in topk]


if __name__ == "__main__":
    main()
