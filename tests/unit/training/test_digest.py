"""Digests: equal if and only if every name, type, shape and bit is."""

from __future__ import annotations

import torch

from lockstep.training.digest import digest


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
