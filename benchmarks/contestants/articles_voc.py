"""DeepLabV3 on VOC as the articles train it: DDP over Gloo, no loader workers, `.item()` in each step.

Model, data, loss and score are those of `examples/voc.py`; the loop is the articles'.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
import torch.distributed as dist
import voc
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = voc.parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    train = voc.Scenes(options.data, transforms=voc.transforms(options.crop, augment=True))
    test = voc.Scenes(options.data, image_set="val", transforms=voc.transforms(options.crop))
    sampler = DistributedSampler(train)
    batch = options.batch_size // size
    loader = DataLoader(train, batch, sampler=sampler, drop_last=True)
    own = DataLoader(test, batch, sampler=DistributedSampler(test, shuffle=False))
    torch.manual_seed(0)
    model = DistributedDataParallel(voc.build(options))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    steps = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, steps, power=0.9)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for images, labels in loader:
            loss = voc.loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()

        model.eval()
        table = torch.zeros(voc.CLASSES, voc.CLASSES, dtype=torch.long)
        with torch.no_grad():
            for images, labels in own:
                table += voc.confusion(model(images)["out"], labels)
        dist.all_reduce(table)
        if rank == 0:
            print(
                f"epoch {epoch + 1}  loss {total / len(loader):.4f}  mIoU {voc.mean_iou(table):.2%}"
            )
            torch.save(model.module.state_dict(), "voc.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
