"""What all benchmarks share: options, statistics over interleaved rounds, tables, torchvision.

Importing this module does not import torch, so that short processes can be timed with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import runpy
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

Rounds = Mapping[str, Sequence[float]]

_PEERS = ("accelerate", "lightning-fabric", "pytorch-ignite", "torchft", "torchdata")
_PACKAGES = ("torch", "torchvision", *_PEERS)


def options_parser(doc: str | None, *, pairs: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; `pairs` is the default."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=pairs,
        metavar="K",
        help=f"interleaved rounds (default {pairs})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    return parser


def machine() -> dict[str, str]:
    """Return what the numbers depend on: processor, cores, load, versions."""
    facts = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
    }
    return facts | {name: version for name in _PACKAGES if (version := _version(name))}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Claim:
    """What a benchmark is to show: `a / b` stays on one side of `limit`.

    The measured value is the median of the ratios of the single rounds.
    """

    a: str
    b: str
    limit: float
    at_most: bool

    def judge(self, rounds: Rounds) -> str:
        """Return a line with the measured ratio, its range, and whether the claim holds."""
        ratios = round_ratios(rounds[self.a], rounds[self.b])
        middle = statistics.median(ratios)
        holds = middle <= self.limit if self.at_most else middle >= self.limit
        side = "at most" if self.at_most else "at least"
        return (
            f"{self.a} / {self.b}: {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"claim: {side} {self.limit:.2f}: {'holds' if holds else 'does not hold'}"
        )


def round_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


@dataclass
class Report:
    """Prints tables in Markdown and keeps them for `--json`."""

    title: str
    json_path: Path | None = None
    machine: dict[str, str] = field(default_factory=machine)
    tables: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        print(f"## {self.title}\n\n{facts}", flush=True)

    def compare(
        self,
        heading: str,
        unit: str,
        rounds: Rounds,
        *,
        reference: str,
        claims: Sequence[Claim] = (),
        digits: int = 0,
    ) -> None:
        """Print medians, ranges and ratios to `reference` of contestants that took turns."""
        rows = []
        for name, values in rounds.items():
            ratios = round_ratios(values, rounds[reference])
            rows.append(
                [
                    name,
                    f"{statistics.median(values):,.{digits}f}",
                    f"{min(values):,.{digits}f} to {max(values):,.{digits}f}",
                    f"{statistics.median(ratios):.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            )
        count = len(rounds[reference])
        columns = ["contestant", f"median {unit}", "min to max", f"÷ {reference}", "min to max"]
        verdicts = [claim.judge(rounds) for claim in claims]
        self.table(f"{heading} ({count} rounds)", columns, rows, notes=verdicts)
        self.tables[-1]["rounds"] = {name: list(values) for name, values in rounds.items()}
        self.tables[-1]["claims"] = [asdict(claim) for claim in claims]

    def table(
        self,
        heading: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        notes: Sequence[str] = (),
    ) -> None:
        """Print one table, with notes below."""
        print(f"\n### {heading}\n")
        print("\n".join(_aligned(columns, rows)))
        if notes:
            print()
        for note in notes:
            print(f"- {note}")
        sys.stdout.flush()
        self.tables.append(
            {
                "heading": heading,
                "columns": list(columns),
                "rows": [list(row) for row in rows],
                "notes": list(notes),
            }
        )

    def close(self) -> None:
        """Write the file that `--json` asks for."""
        print(flush=True)
        if self.json_path is not None:
            content = {"title": self.title, "machine": self.machine, "tables": self.tables}
            self.json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def show(line: Sequence[str]) -> str:
        first = line[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return f"| {' | '.join([first, *others])} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [show(columns), show(rule), *map(show, rows)]


def in_turns(cases: Mapping[str, Any], pairs: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Call every case once per round, A B C A B C …, and return what they measured by name.

    Args:
        cases: functions without arguments that return a number.
        pairs: rounds that count.
        warm_up: rounds before, that don't.
    """
    rounds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(warm_up + pairs):
        for name, case in cases.items():
            value = case()
            if number >= warm_up:
                rounds[name].append(value)
    return rounds


def torchrun(n: int, script: Path, *arguments: str) -> list[str]:
    """Return the command that starts `script` on `n` ranks by torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, "--nproc-per-node", str(n), str(script), *arguments]


def mpiexec(library: str, n: int, script: Path, *arguments: str) -> list[str]:
    """Return the command that starts `script` on `n` ranks by one of the libraries of `make mpi`.

    Raises:
        SystemExit: if it is not installed.
    """
    root = Path(__file__).parents[1] / ".mpi" / library
    (places,) = list(root.glob("lib/python*/site-packages")) or [None]
    if places is None:
        raise SystemExit(f"{library} is not installed; `make mpi` does it")
    inherited = os.environ.get("PYTHONPATH", "")
    variables = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), str(places), inherited])
        ),
        "MPI4PY_LIBMPI": str(root / "lib"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    # Bound to a core each, ranks would not be the processes that the other contestants have.
    options = ["--bind-to", "none", "--oversubscribe"] if library == "openmpi" else []
    run = [str(root / "bin" / "mpiexec"), *options, "-n", str(n)]
    return ["env", *settings, *run, sys.executable, str(script), *arguments]


def one_thread() -> dict[str, str]:
    """Return this environment with one intra-op thread, and this directory to import from."""
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
    }


def run_quietly(command: Sequence[str], *, timeout: float = 300, **settings: Any) -> str:
    """Run `command` to its end and return its standard output.

    Raises:
        RuntimeError: if it fails, with what it wrote.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **settings
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def import_torchvision() -> ModuleType:
    """Import torchvision, also beside a torch without CUDA, which has no operators for it."""
    runpy.run_path(str(Path(__file__).parents[1] / "examples/cpu_torchvision.py"))
    return importlib.import_module("torchvision")
