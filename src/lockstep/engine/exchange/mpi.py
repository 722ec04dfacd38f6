"""Exchange `mpi`: sums over MPI, for CPU ranks with a fast MPI library.

MPI moves the bits and the sum is taken here, in tree order: the order of `MPI_Allreduce` is the
library's affair. Only between two ranks of one node each there is but one order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum, done
from lockstep.engine.exchange.native import NativeExchange
from lockstep.engine.exchange.scratch import Scratch
from lockstep.engine.exchange.tree import TreeExchange, Work
from lockstep.errors import PeerError, RunError, UsageError
from lockstep.world import mpi
from lockstep.world.mpi import Communicator, Request

#: MPI types by size in bytes: bits are moved, whatever they mean. Not bytes throughout, since many
#: libraries count up to 2^31 only.
_CARRIERS = {1: "INT8_T", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
#: Classes of MPI's errors. A rank that is gone shows itself as another one, in each library.
_OWN_ERRORS = (
    *("ERR_TRUNCATE", "ERR_COUNT", "ERR_TYPE", "ERR_BUFFER", "ERR_OP", "ERR_ARG", "ERR_ROOT"),
    *("ERR_COMM", "ERR_REQUEST", "ERR_TAG", "ERR_RANK", "ERR_GROUP", "ERR_NO_MEM"),
)
_NUMBERS = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}


def build(context: ExchangeContext) -> Exchange:
    """Return the exchange over MPI.

    Raises:
        WorldError: if MPI is not there, or counts other processes than the run.
    """
    forest, parameters = context.forest, context.parameters
    everyone = mpi.communicator(forest.rank, forest.size)
    if NativeExchange.is_exact(forest) and all(p.dtype in _NUMBERS for p in parameters):
        return PairExchange(everyone, forest)
    return TreeExchange(MpiWire(everyone), forest, name="mpi")


def check(forest: Forest, *, one_host: bool, device: str) -> None:
    """Refuse an exchange over MPI that cannot work here.

    Raises:
        UsageError: if gradients are not in host memory.
        WorldError: if MPI is not there, or counts other processes than the run.
    """
    if device != "cpu":
        raise UsageError(
            f"exchange=mpi with gradients on {device}; expected ranks on CPUs",
            hint="leave exchange to 'auto', which goes over NCCL",
        )
    mpi.communicator(forest.rank, forest.size)


@contextlib.contextmanager
def _mpi_errors() -> Iterator[None]:
    try:
        yield
    except mpi.library().Exception as error:
        if error.Get_error_class() in _own_errors():
            raise RunError(
                f"MPI failed: {error}",
                hint="exchange='tree' (--exchange tree) works without MPI",
            ) from error
        raise PeerError(
            f"MPI failed: {error}",
            hint="another rank is gone, most likely; what happened to it is the cause",
        ) from error


@functools.cache
def _own_errors() -> frozenset[int]:
    """Return the classes of errors that concern this process, and not another rank."""
    return frozenset(getattr(mpi.library(), name) for name in _OWN_ERRORS)


class _Operation:
    """A collective of MPI that has begun; its request keeps the memory alive."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def wait(self) -> None:
        """Wait until it is complete; other threads of this process run meanwhile."""
        with _mpi_errors():
            self._request.Wait()


class MpiWire:
    """MPI as a wire: collectives that begin now and are waited for later.

    Args:
        everyone: a communicator with the run's ranks in their order.
    """

    def __init__(self, everyone: Communicator) -> None:
        self._everyone = everyone
        self.sent = 0

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin an all-to-all."""
        size = len(shares)
        self.sent += outgoing.nbytes * (size - 1) // size
        memory, carrier = _carried(received)
        given, _ = _carried(outgoing)
        request = self._everyone.Ialltoallv(
            [given, [outgoing.numel() // size] * size, carrier], [memory, list(shares), carrier]
        )
        return _Operation(request)

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Work:
        """Begin an all-gather."""
        self.sent += total.nbytes - part.nbytes
        return _Operation(self._everyone.Iallgather(_carried(part), _carried(total)))


class PairExchange(Exchange):
    """All-reduce by MPI between two ranks of one node each: one addition, and IEEE addition commutes."""

    name = "mpi"
    exact = True
    sent = 0

    def __init__(self, everyone: Communicator, forest: Forest) -> None:
        assert NativeExchange.is_exact(forest)
        self._everyone = everyone
        self._scratch = Scratch()

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return memory for this rank's node: the bucket itself where that is enough."""
        return [self._scratch.take(bucket, bucket.numel() + extra) if extra else bucket]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Sum `slots` over both ranks, and return the sum's future.

        It waits. MPI moves little while it is not called, so that nothing is won by waiting later; and
        Open MPI's `MPI_Iallreduce` takes twice as long as its `MPI_Allreduce`.
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
    """Return the memory of a tensor, and the MPI type that carries its elements."""
    memory = tensor.view(-1).view(torch.uint8).numpy()
    return memory, getattr(mpi.library(), _CARRIERS[tensor.element_size()])
