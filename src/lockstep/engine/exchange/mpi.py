"""Exchange `mpi`: sums over MPI, for CPU ranks with a fast MPI library.

MPI only sends the gradients, and ranks add them in tree order (that of a fixed binary tree over replicas),
since the order of `MPI_Allreduce` depends on the library. Two ranks with one replica each use
`MPI_Allreduce`: there is only one order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.engine.exchange.base import (
    Exchange,
    ExchangeContext,
    Forest,
    ScratchExchange,
    Sum,
    done,
)
from lockstep.engine.exchange.native import NativeExchange
from lockstep.engine.exchange.tree import TreeExchange, Work
from lockstep.errors import PeerError, RunError, UsageError
from lockstep.world import mpi
from lockstep.world.mpi import Communicator, Request

#: MPI types of the same size, by size in bytes. Not bytes for all sizes, since many libraries can count
#: only 2^31 elements.
_CARRIERS = {1: "INT8_T", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
#: Classes of MPI errors with a cause in this process, not in the end of another rank.
_OWN_ERRORS = (
    *("ERR_TRUNCATE", "ERR_COUNT", "ERR_TYPE", "ERR_BUFFER", "ERR_OP", "ERR_ARG", "ERR_ROOT"),
    *("ERR_COMM", "ERR_REQUEST", "ERR_TAG", "ERR_RANK", "ERR_GROUP", "ERR_NO_MEM"),
)
_NUMBERS = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}


def build(context: ExchangeContext) -> Exchange:
    """Return an exchange that sums gradients over MPI.

    This is a `PairExchange` for two ranks with one float32 or float64 sum each, else a `TreeExchange`.

    Raises:
        WorldError: if MPI is missing, or has a different number of processes than the run.
    """
    forest, parameters = context.forest, context.parameters
    everyone = mpi.communicator(forest.rank, forest.size)
    if NativeExchange.is_exact(forest) and all(p.dtype in _NUMBERS for p in parameters):
        return PairExchange(everyone, forest)
    return TreeExchange(MpiWire(everyone), forest)


def check(forest: Forest, *, one_host: bool, device: str) -> None:
    """Raise an error unless gradients can be summed over MPI.

    `device` is the type of the gradients' device. `one_host` is not used.

    Raises:
        UsageError: if gradients are not in CPU memory.
        WorldError: if MPI is missing, or has a different number of processes than the run.
    """
    if device != "cpu":
        raise UsageError(
            f"exchange=mpi with gradients on {device}; expected ranks on CPUs",
            hint="leave exchange to 'auto', which goes over NCCL",
        )
    mpi.communicator(forest.rank, forest.size)


@contextlib.contextmanager
def _mpi_errors() -> Iterator[None]:
    """Return a context manager that turns MPI's exceptions into `PeerError` or `RunError`."""
    try:
        yield
    except mpi.library().Exception as error:
        if error.Get_error_class() in {getattr(mpi.library(), name) for name in _OWN_ERRORS}:
            raise RunError(
                f"MPI failed: {error}",
                hint="exchange='tree' (--exchange tree) works without MPI",
            ) from error
        raise PeerError(
            f"MPI failed: {error}",
            hint="another rank is gone, most likely; what happened to it is the cause",
        ) from error


class _Operation:
    """A running MPI collective; keeps a reference to the tensors that MPI reads and writes."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def wait(self) -> None:
        """Wait until the collective is complete; other threads of the process run meanwhile."""
        with _mpi_errors():
            self._request.Wait()


class MpiWire:
    """Collectives for the tree exchange, over the MPI communicator `everyone`, which has all ranks."""

    def __init__(self, everyone: Communicator) -> None:
        self._everyone = everyone

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin an all-to-all: each rank receives one part of the `outgoing` tensor of every rank.

        The arguments are those of `Wire.scatter`.
        """
        size = len(shares)
        memory, carrier = _carried(received)
        given, _ = _carried(outgoing)
        request = self._everyone.Ialltoallv(
            [given, [outgoing.numel() // size] * size, carrier], [memory, list(shares), carrier]
        )
        return _Operation(request)

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Work:
        """Begin an all-gather: the `part` of every rank is written to `total`, in rank order."""
        return _Operation(self._everyone.Iallgather(_carried(part), _carried(total)))


class PairExchange(ScratchExchange):
    """All-reduce by MPI over two ranks, each with a single tensor to add.

    The sum is exact, since IEEE addition of two numbers commutes.
    """

    sent = 0

    def __init__(self, everyone: Communicator, forest: Forest) -> None:
        assert NativeExchange.is_exact(forest)
        super().__init__(forest)
        self._everyone = everyone

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Sum the gradients of both ranks, wait for the sum, and return it as a completed future.

        MPI makes little progress between calls, so that waiting later would save no time. Open MPI's
        `MPI_Iallreduce` takes twice as long as its `MPI_Allreduce`. The arguments are those of
        `Exchange.start`.
        """
        (total,) = slots
        library = mpi.library()
        self.sent += total.nbytes
        buffer = [total.numpy(), getattr(library, _NUMBERS[total.dtype])]
        with _mpi_errors():
            self._everyone.Allreduce(library.IN_PLACE, buffer, op=library.SUM)
        if last:
            self._scratch.pass_ends()
        return done(total)


def _carried(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return a tensor as an MPI buffer: its memory, and an MPI type of the size of its elements."""
    memory = tensor.view(-1).view(torch.uint8).numpy()
    return memory, getattr(mpi.library(), _CARRIERS[tensor.element_size()])
