"""A plain DistributedDataParallel script in the style of 2020: `--local_rank`, and nothing of Lockstep.

Start it by `lockstep run -n 2 examples/ddp_2020.py`, as by
`python -m torch.distributed.launch --nproc_per_node=2 examples/ddp_2020.py`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    # Torch's own launcher changed the spelling in 2.0; `lockstep run` gives the one that a script takes.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save", default="checkpoint.pt")
    return parser.parse_args()


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(512, 8, generator=generator)
    return TensorDataset(points, (points.sum(dim=1) > 0).long())


def main() -> None:
    args = parse_args()
    use_gpu = torch.cuda.is_available()
    if use_gpu:
        torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank) if use_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if use_gpu else "gloo", init_method="env://")

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    model = DistributedDataParallel(net, device_ids=[args.local_rank] if use_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = make_data()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points.to(device)), labels.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} on {dist.get_world_size()} processes")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
