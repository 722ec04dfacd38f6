import pytest
import torch

from lockstep.training.serialization import pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_as_they_were(dtype: torch.dtype) -> None:
    sent = [
        torch.arange(6).reshape(2, 3).to(dtype),
        torch.zeros(0, 4, dtype=dtype),
        torch.tensor(1.5),
    ]
    received = unpack(pack(sent))
    assert [t.dtype for t in received] == [t.dtype for t in sent]
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


def test_nothing_comes_back_as_nothing() -> None:
    assert unpack(pack([])) == []
