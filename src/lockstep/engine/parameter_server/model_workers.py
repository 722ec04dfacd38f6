"""`ModelWorkers`: a server's sums and optimizers for the workers of one model.

Gradients are summed in the order of the reduction tree, as soon as all workers have sent them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lockstep.engine.exchange.base import Forest
from lockstep.engine.parameter_server.connection import BrokenError, Connection, Pool
from lockstep.engine.parameter_server.messages import DTYPES, Kind, Message
from lockstep.engine.parameter_server.server_optimizer import ServerOptimizer, WorkerRequest
from lockstep.errors import MismatchError, ModelError

_BATCH_HINT = (
    "every rank must call run.backward for every microbatch: a `continue` or a `break` must not depend "
    "on the rank or on one rank's values"
)


class ModelWorkers:
    """A server's connections to the workers that train one model, and its sums and optimizers.

    Args:
        size: number of workers.
        replicas: number of replicas of the run.
        pool: memory for messages.
    """

    def __init__(self, size: int, replicas: int, pool: Pool) -> None:
        self._workers: dict[int, Connection] = {}
        self._forest, self._pool = Forest.of(replicas, size, 0), pool
        self._buckets: dict[int, dict[int, WorkerRequest]] = defaultdict(dict)  # by number, by rank
        self._optimizers: dict[int, ServerOptimizer] = {}  # by the number of the optimizer
        self._left: tuple[str, str] | None = (
            None  # message and hint about the last worker that left
        )
        self._error: dict[str, str | None] | None = None  # why the workers cannot continue

    @property
    def is_empty(self) -> bool:
        """Whether no worker is connected."""
        return not self._workers

    def join(self, connection: Connection) -> None:
        """Add a worker's `connection`; if the model's workers have failed, send it an error."""
        self._workers[connection.rank] = connection
        if self._error is not None:
            connection.send(Kind.ERROR, meta=self._error)

    def leave(self, connection: Connection) -> None:
        """Remove a worker whose `connection` has ended; send an error to workers that wait for it.

        If the worker has not sent a last message (`BYE`), it counts as failed: all other workers get an
        error.
        """
        rank = connection.rank
        self._workers.pop(rank, None)
        for optimizer in self._optimizers.values():
            optimizer.forget(connection)
        how = "left the run" if connection.has_left else "is gone: it closed its connection"
        self._left = (
            f"rank {rank} {how} before the others were done",
            f"what happened to rank {rank} is the cause; see its log",
        )
        if not connection.has_left:
            self._fail(*self._left)
        self._check_left()

    def handle(self, connection: Connection, message: Message) -> None:
        """Process a worker's `message`; if that fails, send all workers the error.

        After an error all messages are ignored.
        """
        if message.header.kind == Kind.BYE:
            connection.has_left = True
        if connection.has_left or self._error is not None:
            return
        try:
            self._serve(WorkerRequest(connection, message))
            self._check_left()
        except MismatchError as error:
            self._fail(error.message, _BATCH_HINT, kind="mismatch")
        except ModelError as error:
            self._fail(error.message, error.hint, kind="model")
        except BrokenError:
            raise
        except Exception as error:  # whatever an optimizer's step raises
            message_text = f"the update failed in a server: {type(error).__name__}: {error}"
            self._fail(message_text, None, kind="model")

    def _serve(self, request: WorkerRequest) -> None:
        kind, tag, number = request.header.kind, request.header.tag, request.header.number
        if kind == Kind.PUSH:
            bucket = self._buckets[number]
            bucket[request.connection.rank] = request
            if len(bucket) == self._forest.size:
                del self._buckets[number]
                self._send_sum([bucket[rank] for rank in range(self._forest.size)])
            return
        optimizer = self._optimizers.setdefault(tag, ServerOptimizer(tag, self._forest, self._pool))
        if kind == Kind.BEGIN:
            optimizer.begin(request.message)
        elif kind == Kind.UPDATE:
            optimizer.update(request)
        elif kind == Kind.STATE:
            optimizer.request_state(request)
        else:
            raise BrokenError("it asks for what servers don't do")

    def _check_left(self) -> None:
        """Send all workers an error if some wait for a worker that has disconnected."""
        waits = self._buckets or any(optimizer.waits for optimizer in self._optimizers.values())
        if waits and self._left is not None:
            self._fail(*self._left)

    def _fail(self, message: str, hint: str | None, *, kind: str = "peer") -> None:
        """Send all workers an error, which they raise; only the first error is sent.

        `kind`: the type of the exception, as a key of `FAILURES` in client.py, or `peer`.
        """
        if self._error is None:
            self._error = {"message": message, "hint": hint, "kind": kind}
            for worker in self._workers.values():
                worker.send(Kind.ERROR, meta=self._error)

    # --- sums ------------------------------------------------------------------------------------

    def _send_sum(self, requests: Sequence[WorkerRequest]) -> None:
        """Sum a bucket of gradients over all workers in a fixed order; send each worker the sum.

        `requests`: the workers' messages for this bucket, in rank order.

        Raises:
            MismatchError: if the messages are of different batches, or of different sizes.
        """
        first = requests[0].header
        size = first.payload // self._forest.counts[0]
        for rank, (request, count) in enumerate(zip(requests, self._forest.counts, strict=True)):
            header = request.header
            if header.place != first.place:
                raise MismatchError(f"rank {rank} computes gradients of another batch than rank 0")
            if (header.tag, header.payload) != (first.tag, count * size):
                raise MismatchError(
                    f"rank {rank} sends {header.payload} bytes of a bucket; "
                    f"expected {count * size}, as rank 0 has them"
                )
        dtype = DTYPES[first.tag]
        payloads = [request.message.payload for request in requests]
        total = self._forest.sum_in_place(
            [
                node
                for payload, count in zip(payloads, self._forest.counts, strict=True)
                for node in payload.view(dtype).view(count, -1)
            ]
        )
        assert total.data_ptr() == payloads[0].data_ptr(), "the sum is in the first worker's memory"
        for memory in payloads[1:]:
            self._pool.give(memory)
        release = self._pool.shared(payloads[0], len(requests))
        for request in requests:
            request.connection.send(Kind.SUM, [total], release=release, number=first.number)
