"""Forward and backward passes through the stages of a row of ranks.

A call of the model is one node of autograd's graph on every rank of the row: what the script computes from
its output, all ranks compute alike, and when gradients come back to that node the ranks go through their
stages in the other direction. So the script's loop is the one it would be on a single device.

All chunks of a batch go forward, one after the other, before the first goes back (GPipe, Huang et al.,
arXiv:1811.06965), as the loss is the script's affair and needs the whole output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lockstep.data.randomness import Generators, States, set_generators, set_key, undisturbed
from lockstep.errors import ModelError, StepError
from lockstep.layout.keys import FORWARD, derive
from lockstep.strategies.message import Message, Row, assemble, dismantle
from lockstep.strategies.stage import Program, Stage

Values = dict[str, Any]
Gradients = list[torch.Tensor | None]


class _Arrival:
    """A tensor that has come from elsewhere, and the gradient that is to go back there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.gradient: torch.Tensor | None = None


class _Arrive(torch.autograd.Function):
    """Begins a graph with a tensor that is no leaf: the next module may change it in place."""

    @staticmethod
    def forward(ctx: Any, _leaf: torch.Tensor, arrival: _Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        tensor, arrival.tensor = arrival.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        (ctx.arrival.gradient,) = gradients
        return None, None


class _Call(torch.autograd.Function):
    """The whole model as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, passing: _Passing, outputs: list[torch.Tensor], _leaf: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, ...]:
        ctx.passing = passing
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, *ctx.passing.backward(list(gradients))


class Flow:
    """What a rank does in the passes through one model.

    Args:
        program: the model's stages.
        row: the ranks that have one each.
        chunks: in how many parts a batch goes through the stages.

    Attributes:
        leaf: what the graph of a loss ends at where it depends on the model.
        waiting: entered while ranks of the row wait for each other.
    """

    def __init__(self, program: Program, row: Row, chunks: int) -> None:
        self.program, self.row, self.chunks = program, row, chunks
        self.leaf = torch.zeros((), requires_grad=True)
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def stage(self) -> Stage:
        """This rank's."""
        return self.program.stages[self.row.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank's stage begins the model."""
        return self.row.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage ends it."""
        return self.row.rank == self.row.size - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, on every rank of the row; all of them call with the same input."""
        values = self.program.bind(args, kwargs)
        passing = _Passing(self, values)
        with self.waiting():
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


class _Passing:
    """One call of the model: its chunks on their way forward, and back.

    Args:
        flow: what the rank does.
        values: what the call begins with.

    Attributes:
        given: tensors of the call that need gradients.
    """

    def __init__(self, flow: Flow, values: Values) -> None:
        self._flow = flow
        tensors: list[torch.Tensor] = []
        self._parts = _dismantled(values, tensors)
        self._tensors = tensors
        grad = torch.is_grad_enabled()
        self._given = [p for p, tensor in enumerate(tensors) if grad and tensor.requires_grad]
        self._sizes = _sizes(tensors, flow.chunks)
        self._arrived: list[list[_Arrival]] = []
        self._begun: list[list[_Arrival]] = []
        self._left: list[list[torch.Tensor]] = []
        self._is_over = False

    @property
    def given(self) -> list[torch.Tensor]:
        """Tensors of the call that need gradients."""
        return [self._tensors[place] for place in self._given]

    # --- forward ---------------------------------------------------------------------------------

    def forward(self) -> Message:
        """Go through this rank's stage with all chunks, and return the model's output."""
        if len(self._sizes) == 1:
            return self._forward_whole()
        # What a chunk draws cannot go on from where the chunk before has drawn in later stages.
        key = derive(int(torch.randint(2**62, ())), FORWARD, self._flow.row.rank)
        with undisturbed():
            set_key(key)
            outputs = [self._forward_chunk(chunk)[0] for chunk in range(len(self._sizes))]
        self._flow.row.flush()
        merged = _merge(outputs, self._sizes) if self._flow.is_last else None
        return self._flow.row.share(merged, self._flow.row.size - 1)

    def _forward_whole(self) -> Message:
        """Draw as one process would: each stage goes on from where the one before has drawn."""
        flow = self._flow
        begin = Generators.now()
        output, states = self._forward_chunk(0, begin)
        flow.row.flush()
        message = flow.row.share([output, states], flow.row.size - 1)
        _, states = message.value
        if states is not None:
            set_generators(states)
        parts = message.parts["list"][0]
        count = len(message.tensors) - sum(state is not None for state in states or ())
        return Message(parts, message.tensors[:count], message.needy[:count])

    def _forward_chunk(
        self, chunk: int, begin: Generators | None = None
    ) -> tuple[Any, States | None]:
        """Go through the stage with one chunk; return its output where it is the model's.

        Args:
            chunk: its number.
            begin: where the generators stood when the model was called, if the stages draw in turn;
                then where they stand afterwards is returned, or `None` if nobody has drawn.
        """
        flow, stage = self._flow, self._flow.stage
        values = self._begin(chunk)
        states = None
        arrived: list[_Arrival] = []
        if not flow.is_first:
            message = flow.row.receive(flow.row.rank - 1)
            came, states = message.value
            tensors = [self._enter(t, n, arrived) for t, n in _pairs(message)]
            came, _ = assemble(message.parts, tensors)
            values |= dict(zip(flow.program.stages[flow.row.rank - 1].keeps, came, strict=True))
        self._arrived.append(arrived)
        if states is not None:
            set_generators(states)
        given = stage.module(*(values[name] for name in stage.takes))
        values |= dict(zip(stage.gives, given, strict=True))
        if begin is not None:
            states = Generators.now().since(begin)
        kept = given[0] if flow.is_last else [values[name] for name in stage.keeps]
        self._left.append(_needy(kept))
        if flow.is_last:
            return kept, states
        flow.row.send([kept, states], flow.row.rank + 1)
        return None, states

    def _begin(self, chunk: int) -> Values:
        """Return what the call begins with, cut to a chunk."""
        start = sum(self._sizes[:chunk])
        size, whole = self._sizes[chunk], sum(self._sizes)
        tensors: list[torch.Tensor] = []
        begun: list[_Arrival] = []
        for place, tensor in enumerate(self._tensors):
            part = tensor
            if len(self._sizes) > 1 and tensor.dim() and len(tensor) == whole:
                part = tensor[start : start + size]
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
        entered: torch.Tensor = _Arrive.apply(self._flow.leaf, arrival)  # type: ignore[no-untyped-call]
        return entered

    # --- backward --------------------------------------------------------------------------------

    def backward(self, gradients: Gradients) -> Gradients:
        """Go back through the stage with all chunks; return the gradients of `given`.

        Args:
            gradients: of the model's outputs that need one.

        Raises:
            StepError: the second time.
        """
        if self._is_over:
            raise StepError(
                "a second backward pass through one call of the model; expected one",
                hint="add the losses, and call run.backward for their sum",
            )
        self._is_over = True
        flow = self._flow
        with flow.waiting():
            for chunk, left in enumerate(self._left):
                own = self._returning(chunk, gradients)
                pairs = [(o, g) for o, g in zip(left, own, strict=True) if g is not None]
                if pairs:
                    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
                if not flow.is_first:
                    flow.row.send([a.gradient for a in self._arrived[chunk]], flow.row.rank - 1)
            flow.row.flush()
            result = self._gradients_of_inputs()
        self._left, self._arrived, self._begun = [], [], []
        return result

    def _returning(self, chunk: int, gradients: Gradients) -> Gradients:
        """Return the gradients of what the stage gave for a chunk."""
        flow = self._flow
        if not self._left[chunk]:
            return []
        if not flow.is_last:
            came: Gradients = flow.row.receive(flow.row.rank + 1).value
            return came
        if len(self._sizes) == 1:
            return gradients
        start, size = sum(self._sizes[:chunk]), self._sizes[chunk]
        return [None if g is None else g[start : start + size] for g in gradients]

    def _gradients_of_inputs(self) -> Gradients:
        """Add up what the stages that took the call's tensors have come to."""
        if not self._given:
            return []
        own = [
            _put_together([begun[place].gradient for begun in self._begun], self._tensors[given])
            for place, given in enumerate(self._given)
        ]
        names = set(self._flow.program.inputs.values())
        total: Gradients = [None] * len(own)
        for number in reversed(range(self._flow.row.size)):
            if names & set(self._flow.program.stages[number].takes):
                came = self._flow.row.share(own, number).value
                total = [
                    b if a is None else a if b is None else a + b
                    for a, b in zip(total, came, strict=True)
                ]
        return total


def _dismantled(values: Values, tensors: list[torch.Tensor]) -> Values:
    try:
        return {name: dismantle(value, tensors) for name, value in values.items()}
    except ModelError as error:
        raise ModelError(
            "a model in stages was called with something else than tensors and numbers in tuples, lists "
            f"and dictionaries: {error.message.partition(' would')[0]}",
            hint="take it apart in the script, and call the model with its tensors",
        ) from error


def _pairs(message: Message) -> list[tuple[torch.Tensor, bool]]:
    return list(zip(message.tensors, message.needy, strict=True))


def _needy(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    dismantle(value, tensors)
    return [tensor for tensor in tensors if torch.is_grad_enabled() and tensor.requires_grad]


def _sizes(tensors: Sequence[torch.Tensor], chunks: int) -> list[int]:
    """Return how many samples each chunk has: no chunk is empty, whatever the batch."""
    batch = next((len(tensor) for tensor in tensors if tensor.dim()), 1)
    count = max(1, min(chunks, batch))
    size, extra = divmod(batch, count)
    return [size + (place < extra) for place in range(count)]


def _merge(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Put the outputs of all chunks together."""
    columns: list[list[torch.Tensor]] = []
    parts = None
    for output in outputs:
        tensors: list[torch.Tensor] = []
        own = dismantle(output, tensors)
        parts = own if parts is None else parts
        if own != parts:
            raise ModelError("chunks of one batch have outputs of different forms")
        columns.append(tensors)
    merged = []
    for row in zip(*columns, strict=True):
        if any(not t.dim() or len(t) != size for t, size in zip(row, sizes, strict=True)):
            raise ModelError(
                f"the model's output has shape {tuple(row[0].shape)} for a chunk of {sizes[0]} "
                "samples; expected one row per sample, to put the chunks together",
                hint="chunks=1 gives the model whole batches",
            )
        merged.append(torch.cat([t.detach() for t in row]).requires_grad_(row[0].requires_grad))
    return assemble(parts, merged)


def _put_together(parts: Sequence[torch.Tensor | None], whole: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor of the call from those of its chunks."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    if len(found) == 1 and found[0].shape == whole.shape:
        return found[0]
    if whole.dim() and sum(map(len, found)) == len(whole) and len(found) == len(parts):
        return torch.cat(found)
    total = found[0]
    for part in found[1:]:
        total = total + part
    return total
