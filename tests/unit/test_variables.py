"""Variables that begin with `LOCKSTEP_`: those that nothing reads are named."""

from __future__ import annotations

import re
from pathlib import Path

import lockstep
from lockstep.unknown_variables import KNOWN, warnings


def test_all_that_the_source_names_are_known() -> None:
    text = "".join(file.read_text() for file in Path(lockstep.__file__).parent.rglob("*.py"))
    named = set(re.findall(r'"(LOCKSTEP_[A-Z_]*[A-Z])["=]', text))
    assert {"LOCKSTEP_RUN_DIR", "LOCKSTEP_TOKEN"} <= named <= KNOWN, named - KNOWN
    settings = {"LOCKSTEP_REPLICAS", "LOCKSTEP_RESUME", "LOCKSTEP_BIND"}
    assert settings <= KNOWN


def test_only_unknown_ones_are_named() -> None:
    environ = {"LOCKSTEP_SEED": "1", "LOCKSTEP_SLURM": "0", "LOCKSTEP": "x", "SEED": "1"}
    assert warnings(environ) == []
    said = "is set, and Lockstep has no variable of this name"
    assert warnings({**environ, "LOCKSTEP_SEDE": "1", "LOCKSTEP_IMAGE": "x"}) == [
        f"lockstep: warning: LOCKSTEP_IMAGE {said}",
        f"lockstep: warning: LOCKSTEP_SEDE {said}; did you mean LOCKSTEP_SEED?",
    ]
