"""Moving batches; `meta` stands for a device that this machine need not have."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.engine.data.build import LoaderSettings, build
from lockstep.engine.data.loader import Loader, to_device
from lockstep.engine.data.microbatch import LoopKey, Start
from lockstep.engine.data.sources import Audited, no_audit

META = torch.device("meta")


class Pair(NamedTuple):
    left: Any
    right: Any


def tensor() -> torch.Tensor:
    return torch.zeros(2)


def test_tensors_anywhere_are_moved() -> None:
    batch = {
        "list": [tensor(), (tensor(), "text")],
        "pair": Pair(tensor(), {"deep": [tensor()]}),
        "ordered": OrderedDict(a=tensor()),
        "number": 3,
        "none": None,
    }
    moved = to_device(batch, META)
    assert type(moved) is dict
    assert list(moved) == list(batch)
    assert moved["list"][0].device == moved["list"][1][0].device == META
    assert type(moved["list"][1]) is tuple
    assert moved["list"][1][1] == "text"
    assert type(moved["pair"]) is Pair
    assert moved["pair"].left.device == moved["pair"].right["deep"][0].device == META
    assert type(moved["ordered"]) is OrderedDict
    assert moved["ordered"]["a"].device == META
    assert (moved["number"], moved["none"]) == (3, None)
    assert batch["list"][0].device.type == "cpu"


def test_a_mapping_with_a_constructor_of_its_own() -> None:
    batch = defaultdict(list, a=tensor())
    assert to_device(batch, META)["a"].device == META


def test_an_object_that_moves_itself() -> None:
    class Graph:
        def to(self, device: torch.device) -> tuple[str, torch.device]:
            return "moved", device

    assert to_device([Graph()], META) == [("moved", META)]


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    packed = to_device(pack_sequence([torch.zeros(3), torch.zeros(1)]), META)
    assert packed.data.device == META
    assert packed.batch_sizes.device.type == "cpu"


class Quiet:
    def loop_begins(self, loader: int, batching: Any) -> Start:
        return Start(key=LoopKey(loader, 0, 0))

    def batch_begins(self, *_args: Any, shown: bool) -> None: ...

    def microbatch_begins(self, microbatch: Any, data: Any) -> None: ...

    def microbatch_ends(self, microbatch: Any, *, left: bool) -> None: ...

    def audit_plan(self, _start: Start) -> Audited:
        return no_audit

    def takes(self, _microbatch: Any) -> bool:
        return True

    def pass_ends(self, microbatch: Any, *, shown: bool) -> None: ...

    def batch_ends(self, *_args: Any) -> bool:
        return False

    def loop_ends(self, *_args: Any, early: bool) -> None: ...

    def fails(self, error: BaseException) -> None: ...


def test_a_loader_moves_to_its_device() -> None:
    data = [(torch.zeros(2), 1) for _ in range(4)]
    source = build(data, LoaderSettings(batch_size=2), 1, range(1), 0)
    for device, expected in ((META, "meta"), (None, "cpu")):
        loader = Loader(source, Quiet(), number=0, batch_size=2, device=device)
        assert {tensor.device.type for x, y in loader for tensor in (x, y)} == {expected}
