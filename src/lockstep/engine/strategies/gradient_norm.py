"""Total norm of gradients: the norm of each, then of these norms in the order of parameters.

torch's `get_total_norm` puts norms of one type and device together before it adds them, in an order that
comes from a hash. With one type the bits are the same; with several, they would follow from where a
gradient lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


@torch.no_grad()
def each_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Return the norm of each gradient, a scalar of its type."""
    if not gradients:
        return []
    norms: dict[int, torch.Tensor] = {}
    groups = _group_tensors_by_device_and_dtype([list(gradients)], with_indices=True)
    for (tensors,), places in groups.values():
        norms |= zip(places, torch._foreach_norm(tensors, norm_type), strict=True)  # type: ignore[arg-type]
    return [norms[place] for place in range(len(gradients))]


@torch.no_grad()
def total_norm(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients from that of each, in the order of parameters."""
    if not norms:
        return torch.tensor(0.0)
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(together, norm_type)
    return total
