"""Console sessions of the README and the manual are run, and show what the commands print."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cli
from tests.console import REASONS, Block, blocks, commands, flags_of_spans, matches
from tests.ports import ROOT

BLOCKS = list(blocks())
VERBS = cli.whole_parser().verbs


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(
            one,
            id=f"{one.page}:{one.line}",
            marks=[pytest.mark.wide] if one.note.startswith("wide") else [],
        )
        for one in BLOCKS
    ],
)
def test_a_session_shows_what_its_commands_print(block: Block, tmp_path: Path) -> None:
    if block.refused is not None:
        assert block.refused in REASONS
        pytest.skip(block.refused)
    assert block.steps, "no line begins with `$ `"
    for name, text in block.files:
        (tmp_path / name).write_text(text)
    if block.script is not None:
        shutil.copy(block.script, tmp_path / "train.py")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    session = "".join(
        f"{{ {command}\n}} > .out{number} 2>&1\ncode=$?\necho $code > .code{number}\n(exit $code)\n"
        for number, (command, _) in enumerate(block.steps)
    )
    environ = {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    subprocess.run(
        [shutil.which("bash") or "/bin/bash", "-c", session],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=600,
    )
    for number, (command, shown) in enumerate(block.steps):
        printed = (tmp_path / f".out{number}").read_text()
        code = (tmp_path / f".code{number}").read_text().strip()
        assert shown or code == "0", f"$ {command}\n{printed}"
        assert matches(shown or "…\n", printed), (
            f"$ {command}\n{printed}\nbut the page shows\n{shown}"
        )


def test_half_of_the_manual_is_no_exception() -> None:
    run = [one for one in BLOCKS if one.refused is None]
    assert len(run) >= 20


@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(*one, id=f"{one[0]}-{number}") for number, one in enumerate(commands())],
)
def test_commands_of_the_manual_are_commands(page: str, command: str) -> None:
    assert cli.parse(shlex.split(command)[1:]).handler, page


def test_flags_that_sentences_name_are_flags() -> None:
    wrong = [
        f"{page}: lockstep {verb} {flag}"
        for page, verb, flag in flags_of_spans()
        if verb in VERBS and flag not in VERBS[verb]._option_string_actions
    ]
    assert not wrong


def test_matching_masks_what_no_two_runs_share() -> None:
    shown = "lockstep: finished steps=46 seconds=6.5 digest=sha256:670e55f9…\n"
    printed = shown.replace("6.5", "17.25").replace("670e55f9…", "7" * 63 + "a")
    assert matches(shown, printed)
    assert not matches(
        shown * 2, printed + printed.replace("7777a", "7777b", 1).replace("77", "78")
    )
    assert matches("…\nend\n", "one\ntwo\nend\n")
    assert not matches("end\n", "one\nend\n")
    assert not matches("2 ranks\n", "3 ranks\n")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_examples_of_the_help_are_commands(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse([*verb.split(), "--help"])
    shown = capsys.readouterr().out.partition("\nexamples:\n")[2]
    lines = [line for line in shown.splitlines() if not line.startswith("  # ")]
    assert lines
    for line in lines:
        command = line[line.index("lockstep ") :].partition(" |")[0].removesuffix(')"')
        cli.parse(shlex.split(command)[1:])
