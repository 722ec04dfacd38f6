"""What an error of MPI says: of a call, or of another rank. MPI itself is in tests/mpi."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.engine.exchange import mpi
from lockstep.engine.exchange.base import Forest
from lockstep.errors import PeerError, RunError


class MpiError(Exception):
    """An error of MPI."""

    def __init__(self, number: int) -> None:
        super().__init__(f"MPI_ERR_{number}")
        self.number = number

    def Get_error_class(self) -> int:  # noqa: N802 - mpi4py's name
        return self.number


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ERR_TRUNCATE", RunError),
        ("ERR_NO_MEM", RunError),
        ("ERR_OTHER", PeerError),
        ("ERR_PROC_FAILED", PeerError),
    ],
)
def test_an_error_of_mpi_is_another_ranks_only_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: type[RunError]
) -> None:
    classes = {one: number for number, one in enumerate((*mpi._OWN_ERRORS, name), 1)}
    library = SimpleNamespace(Exception=MpiError, IN_PLACE=0, FLOAT=0, SUM=0, **classes)

    class Everyone:
        def Allreduce(self, *_: object, **__: object) -> None:  # noqa: N802
            raise MpiError(classes[name])

    monkeypatch.setattr(mpi.mpi, "library", lambda: library)
    exchange = mpi.PairExchange(Everyone(), Forest.of(2, 2, 0))
    with pytest.raises(RunError, match="MPI failed: MPI_ERR_") as caught:
        exchange.start(exchange.slots(torch.ones(4)), last=True)
    assert type(caught.value) is kind
