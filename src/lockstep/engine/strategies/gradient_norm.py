"""Total norm of gradients: first the norm of each gradient, then the norm of these norms.

torch's `get_total_norm` groups the norms by type and device before adding them, in an order that depends on
hashes. So with gradients of several types the result could depend on the devices. Here norms are added in
the order of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


@torch.no_grad()
def each_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each gradient, as a scalar tensor of the gradient's type."""
    if not gradients:
        return []
    norms: dict[int, torch.Tensor] = {}
    groups = _group_tensors_by_device_and_dtype([list(gradients)], with_indices=True)
    for (tensors,), places in groups.values():
        norms |= zip(places, torch._foreach_norm(tensors, norm_type), strict=True)  # type: ignore[arg-type]
    return [norms[place] for place in range(len(gradients))]


@torch.no_grad()
def total_norm(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the total norm of gradients, computed from `norms`, one per gradient in parameter order."""
    if not norms:
        return torch.tensor(0.0)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(together, norm_type)
    return total
