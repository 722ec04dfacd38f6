"""The versions of parameters that late gradients are computed with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.engine.strategies.staleness import Versions
from lockstep.errors import StepError


def value(module: nn.Linear) -> float:
    return module.weight.item()


def model(first: float = 0.0) -> nn.Linear:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, first)
    return module


def update(versions: Versions, module: nn.Linear, to: float) -> None:
    with versions.updating({id(module.weight)}, "SGD"), torch.no_grad():
        module.weight.fill_(to)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_pass_lacks_exactly_so_many_updates(staleness: int) -> None:
    module = model()
    versions = Versions(module, staleness)
    for updates in range(1, 10):
        update(versions, module, float(updates))
        assert value(module) == max(0, updates - staleness)
        versions.show_newest()
        assert value(module) == updates
        versions.show_oldest()


def test_an_update_begins_with_all_updates_before_it() -> None:
    module = model()
    versions = Versions(module, 3)
    for _ in range(5):
        with versions.updating({id(module.weight)}, "SGD"), torch.no_grad():
            module.weight.add_(1)
    versions.show_newest()
    assert value(module) == 5


def test_parameters_that_are_not_updated_stay() -> None:
    module = nn.Sequential(model(7.0), model())
    versions = Versions(module, 2)
    for updates in range(1, 4):
        update(versions, module[1], float(updates))
    assert [value(part) for part in module] == [7, 1]


def test_parameters_that_join_later_count_their_own_updates() -> None:
    module = nn.Sequential(model(), model())
    versions = Versions(module, 2)
    for updates in range(1, 6):
        own = {id(p) for p in list(module.parameters())[: 1 + (updates > 3)]}
        with versions.updating(own, "SGD"), torch.no_grad():
            for part in list(module)[: 1 + (updates > 3)]:
                part.weight.add_(1)
    assert [value(part) for part in module] == [3, 0]


def test_a_state_goes_on_where_it_was() -> None:
    module, other = model(), model()
    versions, again = Versions(module, 2), Versions(other, 2)
    for updates in (1, 2, 3):
        update(versions, module, float(updates))
    with versions.with_newest():
        other.load_state_dict(module.state_dict())
    assert value(other) == 3
    again.load(versions.state())
    assert value(other) == value(module) == 1
    for updates in (4, 5, 6):
        update(versions, module, float(updates))
        update(again, other, float(updates))
        assert value(other) == value(module)
    versions.show_newest()
    other.load_state_dict(module.state_dict())
    again.load(versions.state())
    assert value(other) == 6, "it shows what was shown"


def test_a_state_of_less_staleness_is_taken_as_far_as_it_goes() -> None:
    module, other = model(), model(1.0)
    versions = Versions(module, 3)
    update(versions, module, 1.0)
    again = Versions(other, 1)
    again.load(versions.state())
    update(again, other, 2.0)
    assert value(other) == 1


def test_newest_parameters_while_a_graph_needs_the_oldest() -> None:
    module = model(1.0)
    versions = Versions(module, 1)
    update(versions, module, 3.0)
    loss = module(torch.ones(1, 1, requires_grad=True)).square().sum()
    with versions.with_newest():
        assert module.state_dict()["weight"].item() == 3
    loss.backward()
    assert module.weight.grad.item() == 2, "of the weight 1"


def test_what_the_script_changes_is_refused_and_not_lost() -> None:
    module = model()
    versions = Versions(module, 1)
    nn.init.constant_(module.weight, 5.0)  # before the first update all is the script's
    update(versions, module, 6.0)
    with torch.no_grad():
        module.weight.clamp_(max=1)
    with pytest.raises(StepError, match="the script has changed parameters of SGD itself") as seen:
        update(versions, module, 7.0)
    assert "run.load" in seen.value.hint
    versions.forget()
    update(versions, module, 7.0)
    assert value(module) == 1
