"""The recipes of the manual: each runs as it stands there, the same on three layouts with faults."""

from __future__ import annotations

import re

import pytest

from tests.adversary.verifying import ROOT, Verify
from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

PAGE = (ROOT / "docs/manual/recipes.md").read_text()
#: In the middle of an epoch of six steps, and at the end of one; in others there are twelve.
KILL, TERM = 8, 12
#: What is true of a recipe besides, at its end.
CLAIMS = {
    "ema": "assert int(ema.n_averaged) == run.step == 24",
    "wgan": "assert all(w.abs().max() <= 0.05 for w in critic.parameters()) and run.step == 48",
    "mean_teacher": "assert not torch.equal(teacher.head.weight, model.head.weight)",
    "bad": "assert run.step == 24 and all(p.isfinite().all() for p in model.parameters())",
    "swa": "assert int(averaged.n_averaged) == 3 and bool(averaged.module.body[1].running_var.ne(1).all())",
    "confusion": "assert int(matrix.sum()) == 96 and int(matrix.sum(1)[0]) == int((labels == 0).sum())",
    "annealing": "assert len(state.norms) == 8 and state.ratio < 0.41 and run.step == 24",
    "stopping": "assert 12 < run.step < 300",
    "unfreezing": "assert len(optimizer.param_groups) == 2",
    "streams": "assert bool((carried.rows != 0).any(1).all())",
    "accumulation": "assert run.step == 18",
}


def recipes() -> dict[str, str]:
    """Return the recipes by the names of their runs; each begins with all that they share."""
    shared, *blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    found = {}
    before = [shared]
    for block in blocks:
        (name,) = re.findall(r'lockstep\.Run\("(\w+)"', block)
        definitions = block[: block.index("\nwith lockstep.Run")] if "\nwith" in block else ""
        found[name] = "\n\n".join([*before, block])
        before.append(definitions)
    return found


RECIPES = recipes()


@pytest.mark.wide(beyond=4)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", sorted(RECIPES, key=lambda name: name != "replay"))
def test_a_recipe_is_the_same_on_all_layouts(verify: Verify, name: str) -> None:
    script = verify.directory / f"{name}.py"
    script.write_text(f"{RECIPES[name]}\n{CLAIMS.get(name, '')}\n")
    verdict = verify(script, ["1", f"3,kill@{KILL}", f"2,term@{TERM}"])
    assert verdict.difference is None, verdict.difference.text
    assert verdict.holds, verdict.as_json()
    assert [outcome.generations for outcome in verdict.outcomes] == [1, 2, 2]


def test_token_means_are_those_of_one_batch(lockstep: Lockstep) -> None:
    """Four replicas update as one does, whose microbatch is the batch."""
    script = RECIPES["tokens"].replace("AdamW", "SGD").replace("epochs(4)", "epochs(1)")
    show = "print([round(float(p.double().square().sum()), 5) for p in model.parameters()])"
    name = lockstep.script(f"{script}\n{show}\n", "tokens.py")
    printed = [
        lockstep("run", "-n", "1", name, env={"LOCKSTEP_REPLICAS": replicas}).out.splitlines()
        for replicas in ("1", "4")
    ]
    one, four = ([line for line in lines if line.startswith("[")] for lines in printed)
    assert one
    assert one == four


def test_each_recipe_has_a_claim_that_fits() -> None:
    assert CLAIMS.keys() <= RECIPES.keys()
