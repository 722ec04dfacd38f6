"""The manual's page of settings, from the table in `lockstep.settings`.

`python -m tests.settings_page` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.settings import OF_RUNS, TABLE, Setting
from tests.ports import ROOT

PAGE = ROOT / "docs/manual/settings.md"
#: Where the manual says more.
_MORE = {
    "replicas": "replicas-and-layouts.md",
    "exact": "what-breaks-the-promise.md",
    "strategy": "strategies.md",
    "exchange": "replicas-and-layouts.md#exchanges",
    "sync_every": "slow-links.md",
    "mesh": "pipeline.md",
    "servers": "parameter-server.md",
    "staleness": "parameter-server.md#staleness",
    "precision": "precision.md",
    "devices": "devices.md",
    "threads": "replicas-and-layouts.md#threads",
    "run_dir": "records.md",
    "resume": "checkpoints.md#resume",
    "fresh": "records.md#a-directory-that-exists",
    "checkpoint_every": "checkpoints.md",
    "keep": "checkpoints.md",
    "loggers": "records.md#loggers",
    "trace": "records.md",
    "bind": "devices.md",
    "max_restarts": "when-something-dies.md",
    "preempt_signal": "when-something-dies.md",
    "hang_timeout": "when-something-dies.md#a-hang",
    "shutdown_timeout": "torchrun.md",
}
_HEAD = """\
# Settings

Every setting, from the table in [`lockstep/settings.py`](../../src/lockstep/settings.py); `python -m
tests.settings_page` writes this page. A flag of `lockstep run` wins over the variable, and the variable
over the argument of `lockstep.Run`. `lockstep submit`, `lockstep verify` and `lockstep bench` have the
flags from `--replicas` to `--threads`. In a variable a switch is `1` or `0`, and names
stand between commas.

Arguments of `lockstep.Run` for the rendezvous of the ranks are under [Training](training.md#the-run), the
other flags and variables of launchers under [Launching](launching.md#variables).
"""


def written() -> str:
    """Return the page."""
    runs = [TABLE[name] for name in OF_RUNS]
    launchers = [one for name, one in TABLE.items() if name not in OF_RUNS]
    return "\n".join(
        [
            _HEAD,
            "## Of a run\n",
            *_table(("argument", "flag", "variable", "default", "meaning"), map(_of_run, runs)),
            "\n## Of a launch\n",
            *_table(("flag", "variable", "default", "meaning"), map(_cells, launchers)),
            "",
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def _of_run(one: Setting) -> tuple[str, ...]:
    return (f"`{one.name}`" if one.of_script else "", *_cells(one))


def _cells(one: Setting) -> tuple[str, ...]:
    flag = f"`{one.flag[1]}`" if one.flag else ""
    if one.negatable:
        flag += f", `--no-{one.option.removeprefix('--')}`"
    choices = f"; one of {', '.join(f'`{word}`' for word in one.choices)}" if one.choices else ""
    more = f" ([more]({_MORE[one.name]}))" if one.name in _MORE else ""
    default = one.default_text or f"`{one.shown_default}`"
    return flag, f"`{one.variable}`", default, f"{one.help}{choices}{more}"


if __name__ == "__main__":
    Path(PAGE).write_text(written())
