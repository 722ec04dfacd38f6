"""Digests: equal if and only if every name, type, shape and bit is."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from lockstep.engine.training.digest import digest
from lockstep.errors import ModelError


def of(**state) -> str:
    return digest([state])


def test_the_form() -> None:
    kind, _, text = of(a=torch.ones(2)).partition(":")
    assert kind == "sha256"
    assert len(text) == 64
    assert of(a=torch.ones(2)) == of(a=torch.ones(2))


def test_one_bit_counts() -> None:
    plain = torch.ones(1000)
    changed = plain.clone()
    changed.view(torch.int32)[731] ^= 1
    assert of(a=plain) != of(a=changed)
    assert of(a=torch.tensor([0.0])) != of(a=torch.tensor([-0.0]))


def test_names_types_shapes_and_order_count() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    digests = [
        of(a=a),
        of(b=a),
        of(a=a.reshape(2, 2)),
        of(a=a.view(torch.int32)),
        of(a=a, b=b),
        of(a=b, b=a),
        of(b=b, a=a),
        digest([{"a": a}, {"a": a}]),
        of(a=a.to(torch.float64)),
        of(a={"b": a}),
    ]
    assert len(set(digests)) == len(digests)


def test_the_layout_in_memory_does_not_count() -> None:
    image = torch.randn(2, 3, 4, 5)
    assert of(a=image) == of(a=image.to(memory_format=torch.channels_last))
    assert of(a=image.transpose(0, 1)) == of(a=image.transpose(0, 1).contiguous())


def test_everything_a_state_may_hold() -> None:
    state = {
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "needs": torch.ones(2, requires_grad=True),
        "list": [1, 2.5, None, "text", (torch.ones(1),)],
    }
    assert digest([state]) == digest([state])
    assert digest([state]) != digest([{**state, "list": [1, 2.5, None, "text", (torch.zeros(1),)]}])
    assert digest([state]) != digest([{**state, "list": [1, 2.5, None, "texts", (torch.ones(1),)]}])


def test_the_bytes_of_a_state_of_tensors_numbers_and_text_are_those_of_0_1() -> None:
    state = {"w": torch.arange(3.0), "lr": 0.1, "n": None, "l": [1, {"a": "b"}], "f.0": True}
    assert of(**state) == (
        "sha256:a1428c20c21b0ca6a4f5566d1838865d17a506a84902e1ae77738e8c6eae9a93"
    )


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16, np.complex64])
def test_one_bit_of_a_large_array_counts(kind: type[np.generic]) -> None:
    plain = np.zeros(5000, dtype=kind)  # its text leaves out the middle
    changed = plain.copy()
    changed.view(np.uint8)[4321] ^= 1
    assert of(a=plain) == of(a=plain.copy()) == of(a=np.repeat(plain, 2)[::2])
    assert of(a=plain) != of(a=changed)
    assert of(a=kind(1)) != of(a=np.frombuffer(changed[4321:].tobytes(), dtype=kind)[0])


def test_a_digit_that_the_text_of_an_array_rounds_away_counts() -> None:
    one, other = np.array([0.1]), np.array([np.nextafter(0.1, 1.0)])
    assert repr(one) == repr(other)
    assert of(a=one) != of(a=other)


def test_kinds_of_numbers_and_containers_count() -> None:
    values = [
        *(1, 1.0, True, "1", b"1", None, {}, [], set(), {1}, [1], {"0": 1}, {0: 1}, {"a": {}}),
        *(np.int32(1), np.int64(1), np.array(1), np.array([1]), torch.tensor(1), {"a/b": 1}),
        *({"a": {"b": 1}}, {"a": 1, "b": 1}, {"a:1\0/b": 1}, {b"a": 1}, {"": 1}, {"'0'": 1}),
    ]
    digests = [of(a=value) for value in values]
    assert len(set(digests)) == len(digests)


def test_sets_have_no_order() -> None:
    words = [f"word {number}" for number in range(100)]
    assert of(a=set(words)) == of(a=frozenset(reversed(words)))
    assert of(a=set(words)) != of(a=set(words[1:]))
    code = "from lockstep.engine.training.digest import digest; print(digest([{'a': set('abcdefgh')}]))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert of(a=set("abcdefgh")) == other.stdout.strip()


def test_conjugate_views_are_what_they_show() -> None:
    value = torch.complex(torch.arange(3.0), torch.arange(3.0))
    assert of(a=value.conj()) == of(a=value.conj().resolve_conj())


@pytest.mark.parametrize("value", [object(), np.array([object()]), torch.eye(2).to_sparse()])
def test_what_has_no_bits_is_refused(value: object) -> None:
    with pytest.raises(ModelError, match=r"the state /a/0 is a (object|ndarray|Tensor); expected"):
        of(a=[value])
