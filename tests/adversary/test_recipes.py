"""The recipes of the manual: each runs as it stands there, the same on three layouts with faults."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from tests.adversary.verifying import ROOT, Verify
from tests.blocks import named
from tests.conftest import Done, Lockstep

pytestmark = pytest.mark.forked

PAGE = (ROOT / "docs/manual/more-recipes.md").read_text()
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
    "compiled": "assert net._compiled_call_impl is not None and 'body.0.weight' in model.state_dict()",
    "lora": "assert len(learning) == 4 and (run.directory / 'adapter').is_dir()",
    "profiled": "assert list((run.directory / 'profile').glob('*.pt.trace.json'))",
    "plateau": "assert schedule.get_last_lr()[0] < 0.5",
    "table": "assert run.step == 20",
    "streamed": "assert run.step == 24",
    "shards": "assert run.step == 24",
}


#: The newer page: on two layouts; what its recipes need, and what only `make test-wide` runs.
NEEDS = {
    "lora": ["peft"],
    "table": ["datasets"],
    "streamed": ["datasets"],
    "shards": ["webdataset"],
}
SLOW = ("lora", "compiled")


def recipes(page: str) -> dict[str, str]:
    """Return the recipes of a page by the names of their runs; each begins with all that they share."""
    shared, *blocks = named(page)
    found = {}
    before = [shared]
    for block in blocks:
        names = re.findall(r'lockstep\.Run\("(\w+)"', block)
        definitions = block[: block.index("\nwith lockstep.Run")] if "\nwith" in block else ""
        for name in names:
            found[name] = "\n\n".join([*before, block])
        if page == "recipes.md":
            before.append(definitions)
    return found


RECIPES, MORE = recipes("recipes.md"), recipes("more-recipes.md")
#: Recipes of more than a script, with tests of their own.
STORED, TRIAL, NOTEBOOK = (MORE.pop(name) for name in ("stored", "trial", "notebook"))


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


def _needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: make test-adversary brings it"
    return pytest.mark.skipif(bool(missing), reason=reason)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[*[pytest.mark.wide] * (name in SLOW), _needs(*NEEDS.get(name, ()))],
        )
        for name in MORE
    ],
)
def test_a_recipe_with_a_library_is_the_same_on_two_layouts(verify: Verify, name: str) -> None:
    script = verify.directory / f"{name}.py"
    before = (
        "import examples.cpu_torchvision\n" if name == "lora" else ""
    )  # PEFT imports torchvision
    script.write_text(f"{before}{MORE[name]}\n{CLAIMS.get(name, '')}\n")
    verdict = verify(script, ["1", f"2,kill@{KILL}"])
    assert verdict.difference is None, verdict.difference.text
    assert verdict.holds, verdict.as_json()
    assert [outcome.generations for outcome in verdict.outcomes] == [1, 2]


def test_in_batch_negatives_have_the_gradient_of_the_whole_batch(lockstep: Lockstep) -> None:
    """Also that of a parameter which the loss uses directly: with one replica the loss is a plain one."""
    text = RECIPES["contrast"].replace(
        "AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.1)"
    )
    text = (
        text.replace("nn.Dropout(0.1), ", "")
        + "\n    print(model.scale.item(), model.net[0].weight.norm().item())\n"
    )
    found = []
    for replicas in ("1", "4"):
        script = lockstep.script(text.replace("replicas=4", f"replicas={replicas}"))
        done = lockstep.python(script)
        assert done.code == 0, done.err
        found.append([float(number) for number in done.out.split()[:2]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][0] != pytest.approx(1.6, rel=1e-2)


@pytest.mark.ranks(2)
def test_activation_checkpointing_changes_no_bit(lockstep: Lockstep) -> None:
    plain = MORE["checkpointed"].replace("checkpoint(block, x, use_reentrant=False)", "block(x)")
    assert plain != MORE["checkpointed"]
    names = lockstep.script(plain, "plain.py"), lockstep.script(MORE["checkpointed"])
    ran = [lockstep("run", "-n", ranks, name) for ranks, name in zip("12", names, strict=True)]
    assert _digest(ran[0]) == _digest(ran[1])


@pytest.mark.ranks(2)
def test_checkpoints_of_a_store_continue_a_run(lockstep: Lockstep) -> None:
    (upload,) = re.findall(r"(?ms)^Save this as `store.py`:\n\n```python\n(.*?)^```$", PAGE)
    lockstep.script(upload, "store.py")
    lockstep.script(STORED)
    url = f"file://{lockstep.directory}/bucket"
    whole = lockstep("run", "-n", "2", "train.py", env={"STORE": url})
    stored = sorted(lockstep.directory.glob("bucket/checkpoints/step-*"))
    assert stored
    fetched = lockstep.python("store.py", url, "runs/again")
    assert fetched.code == 0, fetched.err
    again = lockstep("run", "-n", "1", "--run-dir", "runs/again", "train.py", env={"STORE": url})
    assert re.search(r"resuming after step (6|12|18|24) ", again.err), again.err
    assert _digest(again) == _digest(whole)

    weights = {"models.0.head.bias": torch.full((4,), torch.nan)}
    with pytest.warns(UserWarning, match="single process"):  # no process group: nothing is wrong
        dcp.load(weights, storage_reader=FsspecReader(f"file://{stored[-1]}"), no_dist=True)
    assert weights["models.0.head.bias"].isfinite().all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "library", [False, pytest.param(True, marks=_needs("optuna"))], ids=["grid", "optuna"]
)
def test_a_search_finds_the_same_on_any_layout(lockstep: Lockstep, library: bool) -> None:
    (search,) = [block for block in named("more-recipes.md") if block.startswith("import optuna")]
    script = TRIAL.partition("\nif __name__")[0] + "\n" + search if library else TRIAL
    found = []
    for ranks in (1, 2):
        assert "n=2" in script
        lockstep.script(script.replace("n=2", f"n={ranks}"), "search.py")
        done = lockstep.python("search.py", timeout=120)
        assert done.code == 0, done.err
        found.append(done.out.splitlines()[-1])
    assert found[0] == found[1]
    assert "lr" in found[0] if library else found[0].startswith("0.")


_NOTEBOOK = """
import sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(source) for source in sys.argv[1:]]
client = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=100)
client.execute()
"""


@pytest.mark.ranks(2)
@_needs("nbclient", "ipykernel")
def test_a_notebook_trains_alone_and_on_two_ranks(lockstep: Lockstep) -> None:
    shared, *_ = named("more-recipes.md")
    own = NOTEBOOK.removeprefix(shared)
    assert "assert lockstep.launch(train, n=2) == " in own
    done = lockstep.python("-c", _NOTEBOOK, shared, own, timeout=120)
    assert done.code == 0, done.err
    refused = lockstep.python("-c", _NOTEBOOK, shared, own.replace("[alone, alone]", "[]"))
    assert "AssertionError" in refused.err


def _digest(done: Done) -> str:
    assert done.code == 0, done.err
    (found,) = re.findall(r"digest=(sha256:[0-9a-f]{64})", done.out)
    return str(found)


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
    assert CLAIMS.keys() <= {*RECIPES, *MORE}
