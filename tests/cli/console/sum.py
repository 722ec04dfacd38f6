import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
ones = torch.ones(1)
dist.all_reduce(ones)
print(f"rank {rank} of {size}: sum {int(ones)}")
dist.destroy_process_group()
