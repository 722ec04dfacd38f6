"""Modules that the fork server of test ranks imports once, so that ranks start fast."""

import gc

import torch._dynamo  # the first optimizer of a process imports it, which takes longer than a small test
import torch.distributed
import torch.nn.parallel

import lockstep.run

__all__ = ["lockstep", "torch"]

gc.collect()
gc.freeze()  # a collection in a rank would copy the pages of all that it shares with the others
