"""Modules that every rank needs, imported once in the process that ranks are forked from."""

import torch._dynamo  # the first optimizer of a process imports it, which takes longer than a small test
import torch.distributed
import torch.nn.parallel

import lockstep.training.run

__all__ = ["lockstep", "torch"]
