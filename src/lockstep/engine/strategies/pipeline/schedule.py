"""Schedule of a pipeline: forward and backward passes through the stages.

Every rank that holds the model gets the model's output, and computes the same loss from the output. The
call of the model is one node of autograd's graph. In the backward pass of that node, gradients are sent
through the stages in reverse order. So the script's loop is the same as on a single device.

The forward passes of all chunks (parts of a batch) come before the first backward pass (GPipe, Huang et
al., arXiv:1811.06965), since the script computes the loss from the whole output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from lockstep.engine.data.randomness import Generators, States, set_generators, set_key, undisturbed
from lockstep.engine.layout.keys import FORWARD, derive
from lockstep.engine.strategies.gradient_accumulation import Gradients
from lockstep.engine.strategies.model_context import Waiting
from lockstep.engine.strategies.pipeline import chunks as chunking
from lockstep.engine.strategies.pipeline.consistency import CallCheck, fingerprint
from lockstep.engine.strategies.pipeline.p2p import Message, RowCommunicator, assemble, dismantle
from lockstep.engine.strategies.pipeline.stage import Program, Stage
from lockstep.errors import ModelError, StepError

Values = dict[str, Any]


class _Arrival:
    """A tensor that enters this rank's stage, and later its gradient.

    The tensor comes from the previous stage, which is sent the gradient, or from the call of the model.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.gradient: torch.Tensor | None = None


class _Arrive(torch.autograd.Function):
    """Autograd function that returns a tensor as a non-leaf, which modules may modify in place.

    In the backward pass it stores the tensor's gradient in the `_Arrival`.
    """

    @staticmethod
    def forward(ctx: Any, _leaf: torch.Tensor, arrival: _Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        tensor, arrival.tensor = arrival.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        (ctx.arrival.gradient,) = gradients
        return None, None


class _Call(torch.autograd.Function):
    """Autograd function by which a call of the whole model is one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, passing: _ModelCall, outputs: list[torch.Tensor], _leaf: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.passing = passing
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise StepError(
                "create_graph=True through a model in stages; expected a backward pass whose gradients "
                "need no gradients themselves",
                hint="strategy='ddp' or 'fsdp', or a penalty that needs no second derivatives",
            )
        return None, None, None, *ctx.passing.backward(list(gradients))


class Schedule:
    """The `forward` of a pipelined model: runs this rank's stage, exchanges data with other stages.

    Args:
        chunks: number of chunks of a batch, and names of the arguments cut into chunks (or `None`).

    Attributes:
        leaf: leaf tensor at which the graph of a loss ends, in place of the parameters.
        drawn: called without arguments if a chunk has drawn random numbers, on any rank.
    """

    def __init__(
        self,
        program: Program,
        row: RowCommunicator,
        chunks: tuple[int, Sequence[str] | None],
        calls: CallCheck,
        waiting: Waiting = nullcontext,
    ) -> None:
        self.program, self.row, self.calls = program, row, calls
        self.chunks, self.chunk_inputs = chunks
        self.leaf = torch.zeros((), requires_grad=True)
        self._end = get_gradient_edge(self.leaf).node
        self._waiting = waiting
        self._is_interrupted = False
        self.drawn: Callable[[], None] = lambda: None

    @property
    def stage(self) -> Stage:
        """The stage of this rank."""
        return self.program.stages[self.row.rank]

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage of the model."""
        return self.row.rank == self.row.size - 1

    @property
    def accumulates(self) -> bool:
        """Whether the current backward pass accumulates gradients, unlike one of `autograd.grad`.

        A private function of torch (2.13) tells this; `register_multi_grad_hook` uses it, too.
        """
        return torch._C._will_engine_execute_node(self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass, and return its output on all ranks of the model; collective."""
        values = self.program.bind(args, kwargs)
        passing = _ModelCall(self, values)
        with self.passing():
            message = passing.forward()
        tensors = message.tensors
        if torch.is_grad_enabled() and any(message.needy):
            places = [place for place, needy in enumerate(message.needy) if needy]
            needy = _Call.apply(  # type: ignore[no-untyped-call]
                passing, [tensors[place].detach() for place in places], self.leaf, *passing.given
            )
            tensors = list(tensors)
            for place, tensor in zip(places, needy, strict=True):
                tensors[place] = tensor
        return assemble(message.parts, [t if t.requires_grad else t.detach() for t in tensors])

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Return a context manager for a forward or backward pass, which limits waits for other ranks.

        A `StepError` is raised if an exception has ended an earlier pass, since other ranks may still wait
        for messages of that pass.
        """
        if self._is_interrupted:
            raise StepError(
                f"a pass through {self.calls.name} was interrupted by an exception, and the other ranks of "
                "the model may wait for its messages",
                hint="let exceptions of the model end the run; it resumes from its newest state",
            )
        self._is_interrupted = True
        with self._waiting():
            yield
        self._is_interrupted = False


class _ModelCall:
    """One call of the model: forward and backward passes of its chunks (parts of the batch)."""

    def __init__(self, schedule: Schedule, values: Values) -> None:
        self._schedule = schedule
        self._parts, tensors, arguments = _dismantled(values, schedule.program.inputs)
        self._tensors = tensors
        grad = torch.is_grad_enabled()
        self._given = [p for p, tensor in enumerate(tensors) if grad and tensor.requires_grad]
        #: Those tensors among the call's arguments for which gradients are needed.
        self.given = [tensors[place] for place in self._given]
        self._split = chunking.split(tensors, arguments, schedule.chunks, schedule.chunk_inputs)
        self._sizes = self._split.sizes
        self._arrived: list[list[_Arrival]] = []
        self._begun: list[list[_Arrival]] = []
        self._left: list[list[torch.Tensor]] = []
        self._number = schedule.calls.next()
        self._is_over = False
        self._has_drawn = (
            False  # whether a chunk has drawn random numbers, in this or earlier stages
        )

    # --- forward ---------------------------------------------------------------------------------

    def forward(self) -> Message:
        """Run this rank's stage on all chunks; return the output of the whole model, on every rank.

        The last rank broadcasts the output.
        """
        self._schedule.calls.check(
            "forward pass", self._number, fingerprint(self._parts, self._tensors)
        )
        if len(self._sizes) == 1:
            # As in one process: each stage continues the random stream of the previous stage.
            return self._share(*self._forward_chunk(0, Generators.now()))
        # A chunk cannot continue the stream of the previous chunk, which later stages still use.
        key = derive(int(torch.randint(2**62, ())), FORWARD, self._schedule.row.rank)
        with undisturbed():
            set_key(key)
            outputs = [self._forward_chunk(chunk)[0] for chunk in range(len(self._sizes))]
        merged = chunking.merge(outputs, self._sizes) if self._schedule.is_last else None
        return self._share(merged, None)

    def _share(self, output: Any, states: States | None) -> Message:
        """Broadcast `output` and `states` from the last rank; return the output on each rank.

        `states`: states of the random generators after the last stage, for all ranks to load, or `None`.
        """
        row = self._schedule.row
        row.flush()
        message = row.share([output, states, self._has_drawn], row.size - 1)
        _, states, has_drawn = message.value
        if has_drawn:
            self._schedule.drawn()
        if states is not None:
            set_generators(states)
        return Message(message.parts["list"][0], message.tensors, message.needy)

    def _forward_chunk(
        self, chunk: int, begin: Generators | None = None
    ) -> tuple[Any, States | None]:
        """Run this rank's stage on chunk number `chunk`; return `(output, states)`.

        The input comes from the previous stage, and the result is sent to the next one. `output`: the
        model's output on the last stage, else `None`. `begin`: state of the random generators at the
        model's call, if stages continue one random stream. `states`: of those generators that have drawn
        numbers since `begin`; `None` if none has, or without `begin`.
        """
        schedule = self._schedule
        rank = schedule.row.rank
        message = schedule.row.receive(rank - 1) if rank else None
        if message is not None:
            _, states, has_drawn = message.value
            self._has_drawn |= has_drawn
            if states is not None:
                set_generators(states)
        before = begin or Generators.now()
        kept = self._compute(chunk, message)
        states = Generators.now().since(before)
        if begin is None:
            self._has_drawn |= states is not None
            states = None
        if schedule.is_last:
            return kept, states
        schedule.row.send([kept, states, self._has_drawn], rank + 1)
        return None, states

    def _compute(self, chunk: int, message: Message | None) -> Any:
        """Run this rank's stage on a chunk; return values for the next stage, or the model's output.

        `message`: values from the previous stage.
        """
        schedule, stage = self._schedule, self._schedule.stage
        values = self._begin(chunk)
        arrived: list[_Arrival] = []
        tensors: list[torch.Tensor] = []
        if message is not None:
            pairs = zip(message.tensors, message.needy, strict=True)
            tensors = [self._enter(tensor, needy, arrived) for tensor, needy in pairs]
            came, *_ = assemble(message.parts, tensors)
            values |= dict(
                zip(schedule.program.stages[schedule.row.rank - 1].keeps, came, strict=True)
            )
        self._arrived.append(arrived)
        given = stage.module(*(values[name] for name in stage.takes))
        values |= dict(zip(stage.gives, given, strict=True))
        kept = given[0] if schedule.is_last else [values[name] for name in stage.keeps]
        tensors = []
        dismantle(kept, tensors)  # raises an error for objects that cannot be sent
        grad = torch.is_grad_enabled()
        self._left.append([tensor for tensor in tensors if grad and tensor.requires_grad])
        return kept

    def _begin(self, chunk: int) -> Values:
        """Return the arguments of the model's call, cut to one chunk of the batch."""
        tensors: list[torch.Tensor] = []
        begun: list[_Arrival] = []
        for place, tensor in enumerate(self._tensors):
            part = self._split.part(place, tensor, chunk)
            if place in self._given:
                part = self._enter(part.detach().clone(), True, begun)
            tensors.append(part)
        self._begun.append(begun)
        return {name: assemble(parts, tensors) for name, parts in self._parts.items()}

    def _enter(self, tensor: torch.Tensor, needy: bool, arrived: list[_Arrival]) -> torch.Tensor:
        if not (needy and torch.is_grad_enabled()):
            return tensor
        arrival = _Arrival(tensor)
        arrived.append(arrival)
        entered: torch.Tensor = _Arrive.apply(self._schedule.leaf, arrival)  # type: ignore[no-untyped-call]
        return entered

    # --- backward --------------------------------------------------------------------------------

    def backward(self, gradients: Gradients) -> Gradients:
        """Run this rank's backward pass for all chunks; return the gradients of the call's input tensors.

        `gradients`: gradients of the model's outputs. A second call raises a `StepError`.
        """
        if self._is_over:
            raise StepError(
                "a second backward pass through one call of the model; expected one",
                hint="add the losses, and call run.backward for their sum; or call the model again",
            )
        self._is_over = True
        schedule, accumulates = self._schedule, self._schedule.accumulates
        kind = "backward pass" if accumulates else "backward pass for inputs alone"
        with schedule.passing():
            schedule.calls.check(kind, self._number)
            for chunk, left in enumerate(self._left):
                own = self._returning(chunk, gradients)
                pairs = [(o, g) for o, g in zip(left, own, strict=False) if g is not None]
                outputs, given = [o for o, _ in pairs], [g for _, g in pairs]
                if pairs and accumulates:
                    torch.autograd.backward(outputs, given)
                elif pairs:  # all inputs of the stage depend on the leaf
                    torch.autograd.grad(outputs, [schedule.leaf], given, allow_unused=True)
                # The previous rank waits for gradients of tensors that it sent with requires_grad.
                if self._arrived[chunk]:
                    came = [a.gradient for a in self._arrived[chunk]]
                    schedule.row.send(came, schedule.row.rank - 1)
            schedule.row.flush()
            result = self._gradients_of_inputs()
        self._left, self._arrived, self._begun = [], [], []
        return result

    def _returning(self, chunk: int, gradients: Gradients) -> Gradients:
        """Return the gradients of the outputs of this rank's stage for one chunk.

        The next rank sends them. On the last rank they are the chunk's parts of `gradients`, the gradients
        of the model's outputs.
        """
        schedule = self._schedule
        if not self._left[chunk]:
            return []
        if not schedule.is_last:
            returned: Gradients = schedule.row.receive(schedule.row.rank + 1).value
            return returned
        if len(self._sizes) == 1:
            return gradients
        return [None if g is None else torch.split(g, self._sizes)[chunk] for g in gradients]

    def _gradients_of_inputs(self) -> Gradients:
        """Return the gradients of the tensors in the model's call; collective.

        Each is summed over the stages that use the tensor.
        """
        if not self._given:
            return []
        own = [
            self._split.gradient(
                given, [begun[place].gradient for begun in self._begun], self._tensors[given]
            )
            for place, given in enumerate(self._given)
        ]
        names = set(self._schedule.program.inputs.values())
        total: Gradients = [None] * len(own)
        for number in reversed(range(self._schedule.row.size)):
            if names & set(self._schedule.program.stages[number].takes):
                came = self._schedule.row.share(own, number).value
                total = [
                    b if a is None else a if b is None else a + b
                    for a, b in zip(total, came, strict=True)
                ]
        return total


def _dismantled(
    values: Values, inputs: dict[str, str]
) -> tuple[Values, list[torch.Tensor], list[str]]:
    """Replace the tensors in a call's arguments by indices; return arguments, tensors, and names.

    The names say for each tensor which argument it comes from. `values`: the arguments by key. `inputs`:
    for each argument of `forward`, its key in `values`.

    Raises:
        ModelError: if an argument contains objects that stages cannot send, such as a user's class.
    """
    tensors: list[torch.Tensor] = []
    arguments: list[str] = []
    parts: Values = {}
    try:
        for argument, name in inputs.items():
            parts[name] = dismantle(values[name], tensors)
            arguments += [argument] * (len(tensors) - len(arguments))
    except ModelError as error:
        raise ModelError(
            "a model in stages was called with something else than tensors and numbers in tuples, lists "
            f"and dictionaries: {error.message.partition(' would')[0]}",
            hint="take it apart in the script, and call the model with its tensors",
        ) from error
    return parts, tensors, arguments
