"""The weights that a converted script ends with, and those of the script that it was made of."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.tools.convert.script import convert
from tests import converted

#: Scripts that draw nothing while they train, the file that each saves, and what is replaced in them: they
#: do not shuffle, since a run shuffles by keys of its own.
SCRIPTS = {
    "straight": ("digits.pt", {"shuffle=True": "shuffle=False"}),
    "trainer": ("best.pt", {"shuffle=True": "shuffle=False"}),
    "amp": ("amp.pt", {"30, True)": "30)"}),
    "ddp": ("ddp.pt", {"shuffle=True": "shuffle=False"}),
    "accumulation": (
        "model.pt",
        {
            "shuffle=True": "shuffle=False",
            'print(f"': 'torch.save(model.state_dict(), "model.pt"), print(f"',
        },
    ),
}
#: Where one replica has the bits of the plain script; in `accumulation` sums are in a different order.
EQUAL = {"straight", "trainer", "amp", "ddp"}


@pytest.fixture
def alone(tmp_path: Path, torch_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run scripts in an empty directory, on one rank; plain scripts draw what runs with their seeds do."""
    monkeypatch.chdir(tmp_path)
    settings = {"DEVICES": "cpu", "THREADS": "1", "PROGRESS": "0", "RUN_DIR": "run"}
    for name, value in settings.items():
        monkeypatch.setenv(f"LOCKSTEP_{name}", value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start, store = dist.init_process_group, dist.HashStore()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: set_key(keys.derive(seed, keys.INIT)))
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend: start(backend, store=store, rank=0, world_size=1),
    )
    yield tmp_path
    assert not dist.is_initialized()


def weights(path: Path, saved: str) -> dict[str, torch.Tensor]:
    """Return what a script saves, which runs here."""
    runpy.run_path(str(path), run_name="__main__")
    found: dict[str, Any] = torch.load(saved, weights_only=True)
    Path(saved).unlink()
    return found.get("net", found)


@pytest.mark.parametrize("name", SCRIPTS)
def test_weights_are_those_of_the_plain_script(
    name: str, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, changes = SCRIPTS[name]
    text = (converted.SCRIPTS / "plain" / f"{name}.py").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    plain, after = alone / f"{name}.py", alone / "converted.py"
    plain.write_text(text)
    after.write_text(convert(plain).text)
    for replicas in (1, 4):
        # Each process of a DDP script has a batch of its own.
        words = ["--batch-size", str(12 * replicas)] if name == "ddp" else []
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        expected = weights(plain, saved)
        monkeypatch.setattr("sys.argv", ["train.py"])
        monkeypatch.setenv("LOCKSTEP_REPLICAS", str(replicas))
        monkeypatch.setenv("LOCKSTEP_RUN_DIR", f"run-{replicas}")
        found = weights(after, saved)
        torch.testing.assert_close(found, expected)
        equal = all(torch.equal(found[one], expected[one]) for one in expected)
        assert equal or replicas > 1 or name not in EQUAL
