"""The exact training: Python's integers come to the same numbers, so that its digest is known before."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from torch import nn

from lockstep.engine.training.digest import digest
from lockstep.tools.doctor import arithmetic
from lockstep.tools.doctor.arithmetic import BATCH, EXACT, LARGEST, SIZES, STEPS, UNIT

Matrix = list[list[int]]


def numbers(rows: int, columns: int, start: int) -> Matrix:
    flat = [(k * 5 + k // 7 + start * 3) % 7 - 3 for k in range(rows * columns)]
    return [flat[row * columns : (row + 1) * columns] for row in range(rows)]


def times(a: Matrix, b: Matrix) -> Matrix:
    return [
        [sum(x * y for x, y in zip(row, column, strict=True)) for column in turned(b)] for row in a
    ]


def turned(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def clamped(value: Fraction, most: int) -> int:
    return max(-most, min(most, round(value)))


def updated(weights: Matrix, gradients: Matrix) -> Matrix:
    """Weights and gradients count in parts of UNIT; the rate is 2^-10."""
    return [
        [clamped(Fraction(w * 1024 - g, 1024), LARGEST * UNIT) for w, g in zip(*rows, strict=True)]
        for rows in zip(weights, gradients, strict=True)
    ]


def by_integers() -> str:
    first, second = (
        [[2 * one for one in row] for row in numbers(out, into, 5 + number)]
        for number, (into, out) in enumerate(itertools.pairwise(SIZES))
    )
    seen = []
    for step in range(STEPS):
        inputs = numbers(BATCH, SIZES[0], step)
        hidden = [[max(0, one) for one in row] for row in times(inputs, turned(first))]
        outputs = times(hidden, turned(second))
        wanted = [[clamped(Fraction(one, UNIT**3), 4) + 1 for one in row] for row in outputs]
        back = times(wanted, second)
        masked = [
            [g * (h > 0) for g, h in zip(*rows, strict=True)]
            for rows in zip(back, hidden, strict=True)
        ]
        gradients = times(turned(masked), inputs), times(turned(wanted), hidden)
        seen += [(outputs, UNIT**2), *((one, UNIT) for one in gradients)]
        first, second = updated(first, gradients[0]), updated(second, gradients[1])
    exact = [torch.tensor(one).double() / unit for one, unit in seen]
    assert all(torch.equal(one.float().double(), one) for one in exact), "nothing is rounded"
    return digest([{str(place): one.float() for place, one in enumerate(exact)}])


def test_the_digest_is_that_of_whole_numbers() -> None:
    assert by_integers() == arithmetic.exact_digest() == EXACT


def test_threads_do_not_matter_and_a_wrong_bit_does(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert arithmetic.exact_digest() == EXACT
    finally:
        torch.set_num_threads(before)
    linear = nn.functional.linear

    def defective(*given: torch.Tensor) -> torch.Tensor:
        outputs = linear(*given)
        outputs.view(-1).data.view(torch.int32)[0] ^= 1 << 10
        return outputs

    ordinary = arithmetic.ordinary_digest()
    assert arithmetic.ordinary_digest() == ordinary
    monkeypatch.setattr(nn.functional, "linear", defective)
    assert arithmetic.exact_digest() != EXACT
    assert arithmetic.ordinary_digest() != ordinary
