"""Modules whose parts lie on several devices (A5). No GPU is needed; none of this has run on several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.engine.strategies.checks import spans_devices


class Placed(nn.Module):
    """Has parameters that say that they are elsewhere."""

    def __init__(self, *places: str) -> None:
        super().__init__()
        self.places = places

    def parameters(self, recurse: bool = True):
        for place in self.places:
            yield type("Tensor", (), {"device": torch.device(place)})()


@pytest.mark.parametrize(
    ("places", "spans"),
    [
        ((), False),
        (("cpu",), False),
        (("cpu", "meta"), False),
        (("cuda:0", "cuda:0"), False),
        (("cpu", "cuda:1"), False),
        (("cuda:0", "cuda:1"), True),
        (("cpu", "cuda:1", "cuda:0"), True),
    ],
)
def test_two_devices_besides_the_processor(places, spans):
    assert spans_devices(Placed(*places)) == spans
