"""A script that knows nothing of Lockstep: writes when its first all-reduce was done."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
assert one.item() == dist.get_world_size()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(repr(time.time()), encoding="utf-8")
dist.destroy_process_group()
