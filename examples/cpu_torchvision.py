"""Lets torch for CPUs import torchvision: import this module before it.

The package index has torchvision for CUDA. Beside torch for CPUs `import torchvision` fails, since the
operators of its library are missing. Here they are declared; models, transforms and datasets call none of
them. With wheels of one build this module changes nothing, and a script of your own does not need it.
"""

import importlib.util

import torch

if importlib.util.find_spec("torchvision") is not None:
    try:
        import torchvision  # noqa: F401 (the import itself is what fails)
    except RuntimeError:  # operator torchvision::nms does not exist
        for _name in ("nms", "qnms"):
            _signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{_name}", _signature)
