"""Keys and borrowed random states reach the generators of GPUs, too; here those are made up."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.data.randomness import Stream, set_key, undisturbed


class Gpus:
    """Two generators in the place of two GPUs'."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        for name, function in (
            ("is_initialized", lambda: True),
            ("manual_seed", self.generators[0].manual_seed),
            ("manual_seed_all", lambda seed: [g.manual_seed(seed) for g in self.generators]),
            ("get_rng_state_all", lambda: [g.get_state() for g in self.generators]),
            ("set_rng_state_all", self._set),
        ):
            monkeypatch.setattr(torch.cuda, name, function)

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def draw(self) -> list[float]:
        return [torch.rand((), generator=generator).item() for generator in self.generators]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, cuda: None) -> Gpus:
    return Gpus(monkeypatch)


def test_a_key_is_that_of_every_gpu(gpus: Gpus) -> None:
    set_key(5)
    first, second = gpus.draw()
    assert first == second


def test_what_is_drawn_in_between_disturbs_no_gpu(gpus: Gpus) -> None:
    set_key(5)
    expected = gpus.draw() + gpus.draw()
    set_key(5)
    found = gpus.draw()
    with undisturbed():
        set_key(6)
        gpus.draw()
    assert found + gpus.draw() == expected


def test_a_stream_has_states_of_its_own_there(gpus: Gpus) -> None:
    set_key(6)
    expected = gpus.draw() + gpus.draw()
    stream = Stream(6)
    set_key(5)
    with stream.active():
        found = gpus.draw()
    gpus.draw()
    with stream.active():
        assert found + gpus.draw() == expected
