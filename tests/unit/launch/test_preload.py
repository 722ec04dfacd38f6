"""What a launcher imports for its workers, as far as flags and source tell what they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.imports import Sources, read
from lockstep.launch.target.preload import Footprint, likely

RUN, DYNAMO = ("lockstep.run", "lockstep.engine.exchange.shared_memory"), "torch._dynamo"


def of_script(script: Path) -> tuple[str, ...]:
    spec = LaunchSpec(target=str(script))
    return likely(spec, read(spec), {})


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.optim.SGD([])",
        "from torch import optim\noptim.SGD([])",
        "from torch import optim as o",
        "from torch.optim import SGD",
        "import torch.optim.lr_scheduler as s",
    ],
)
def test_a_script_with_an_optimizer(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert of_script(script) == (DYNAMO,)


@pytest.mark.parametrize("text", ["import torch\n# torch.optim", "'optim'", "def half a script"])
def test_a_script_without_one(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert of_script(script) == ()


def test_a_script_of_lockstep(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import lockstep")
    assert of_script(script) == (*RUN, DYNAMO)
    script.write_text("from training import main")
    (tmp_path / "training.py").write_text("from lockstep import Run")
    assert of_script(script) == (*RUN, DYNAMO)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("os.environ['TORCH_COMPILE_DISABLE'] = '1'", RUN),
        ("def main():\n    os.environ.update(TORCHDYNAMO_DISABLE='1')", RUN),
        ("load_dotenv()", RUN),
        ("for name, value in given: os.environ[name] = value", RUN),
        ("os.environ.update(json.load(file))", RUN),
        ("os.environ |= given", RUN),
        ("os.environ.update({'A': 'b', **given}, B='c')", RUN),
        ("def main(**given):\n    os.environ.update(**given)", RUN),
        ("from os import putenv\nputenv(name, 'b')", RUN),
        ("os.environ.setdefault(f'{name}_A', 'b')", RUN),
        ("os.environ.setdefault('OMP_NUM_THREADS', size)", (*RUN, DYNAMO)),
        ("os.environ.update({'A': size}, B=size)", (*RUN, DYNAMO)),
        ("os.environ['A'] = given[name] = os.environ[other]", (*RUN, DYNAMO)),
        ("before = dict(os.environ), os.environ.get(name)", (*RUN, DYNAMO)),
        ("def main():\n    os.environ['MASTER_PORT'] = '29500'", (*RUN, DYNAMO)),
        ("word = 'TORCH'", (*RUN, DYNAMO)),
        ("rank = os.environ['RANK'], os.environ.get('A')", (*RUN, DYNAMO)),
    ],
)
def test_a_script_that_sets_what_dynamo_reads(
    tmp_path: Path, line: str, expected: tuple[str, ...]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{line}\nimport lockstep")
    assert of_script(script) == expected


def test_a_strategy_with_imports_of_its_own() -> None:
    spec = LaunchSpec(target="no_such_script.py", settings=FlagSettings(strategy="fsdp"))
    assert likely(spec, Sources(), {}) == (*RUN, DYNAMO, "lockstep.engine.strategies.sharded.model")


def test_a_strategy_that_the_environment_names() -> None:
    spec = LaunchSpec(target="no_such_script.py")
    assert likely(spec, Sources(), {"LOCKSTEP_STRATEGY": "tensor"}) == (
        *RUN,
        DYNAMO,
        "lockstep.engine.strategies.tensor",
    )
    assert likely(spec, Sources(), {"LOCKSTEP_STRATEGY": "ddp"}) == ()


def test_a_flag_wins_over_the_environment() -> None:
    spec = LaunchSpec(target="no_such_script.py", settings=FlagSettings(strategy="ddp"))
    assert likely(spec, Sources(), {"LOCKSTEP_STRATEGY": "tensor"}) == ()


@pytest.mark.parametrize("draw", [np.random.rand, lambda: torch.rand(())])
def test_a_package_that_draws_is_left_to_the_ranks(draw: Callable[[], object]) -> None:
    before = Footprint.look()
    assert before.allows(Footprint.look())
    draw()
    assert not before.allows(Footprint.look())
