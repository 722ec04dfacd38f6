"""The text of a job script. Pure: the same request gives the same text."""

from __future__ import annotations

import shlex
import signal
import unicodedata
from pathlib import Path

from lockstep.errors import PREEMPTED, UsageError
from lockstep.tools.submit.request import JobRequest

#: Seconds that launchers may end after each other before Slurm kills the rest.
_LAST_SECONDS = 60
#: What Slurm sends before it takes the nodes away. Not SIGTERM: that is also how a job is cancelled.
_SIGNAL = signal.SIGUSR1
_NAME = _SIGNAL.name.removeprefix("SIG")
_REQUEUE = f"""\
code=$?

# {PREEMPTED}: preempted, its state is saved. {128 + _SIGNAL}: the signal came before there was any.
# Requeue the job: the same run resumes. A job that Slurm is ending already is left alone.
if [ $code -eq {PREEMPTED} ] || [ $code -eq {128 + _SIGNAL} ]; then
  if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit $code
"""


def job_script(request: JobRequest, *, directory: Path, run_dir: Path, python: str) -> str:
    """Return the script that sbatch takes.

    Raises:
        UsageError: if Slurm could not write to `run_dir`, or a word has a control character.
    """
    # What stands in a directive, where no quotes help. The words of the command may hold anything.
    for text in (str(directory), str(run_dir), python, *request.run_options):
        _check_characters(text)
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `lockstep submit`; `sbatch` takes it as it is, and as you change it.",
            *(f"#SBATCH {option}" for option in _directives(request, directory, run_dir)),
            "",
            "# One launcher on each node starts the ranks of that node.",
            f"{_step(request)} \\",
            f"  {shlex.join(_launcher(request, run_dir, python))}",
            _REQUEUE,
        ]
    )


def _check_characters(text: str) -> None:
    """Refuse what would end a line of the script, so that sbatch would read another directive there."""
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") for character in text):
        raise UsageError(
            f"{text!r} has a control character, and cannot stand in a job script",
            hint="rename the directory, or work in another one",
        )


def output_file(run_dir: Path, job: str) -> Path:
    """Return the file that takes what job number `job` prints."""
    return run_dir / f"slurm-{job}.out"


def _directives(request: JobRequest, directory: Path, run_dir: Path) -> list[str]:
    named = [
        ("job-name", request.name),
        ("nodes", str(request.nodes)),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", _text(request.cpus_per_node)),
        ("gpus-per-node", request.gpus_per_node),
        ("time", request.time_limit),
        ("chdir", str(directory)),
        ("output", _pattern(run_dir, directory)),
        # A job that is requeued continues in the same file.
        ("open-mode", "append"),
    ]
    own = [f"--{name}={_quoted(value)}" for name, value in named if value is not None]
    # The user's own words come last: the last one wins.
    # To the steps of the job, not to its script: that waits for them.
    own += ["--requeue", f"--signal={_NAME}@{request.seconds_to_save}"]
    return [*own, *(_quoted_option(option) for option in request.options)]


def _step(request: JobRequest) -> str:
    words = ["srun", f"--nodes={request.nodes}", f"--ntasks={request.nodes}", "--ntasks-per-node=1"]
    if request.cpus_per_node is not None:
        # Since 22.05 a step does not inherit it.
        words.append(f"--cpus-per-task={request.cpus_per_node}")
    # The launchers end each other when a rank fails, and the one that tells why may not be the first to go.
    return shlex.join([*words, "--kill-on-bad-exit=0", f"--wait={_LAST_SECONDS}"])


def _launcher(request: JobRequest, run_dir: Path, python: str) -> list[str]:
    ranks = "gpu" if request.ranks is None and request.gpus_per_node else request.ranks
    number = [] if ranks is None else ["-n", str(ranks)]
    own = ["--run-dir", str(run_dir), "--preempt-signal", _NAME]
    options = [*number, *own, *request.run_options]
    return [python, "-m", "lockstep", "run", *options, *request.command]


def _pattern(run_dir: Path, directory: Path) -> str:
    """Return the output file's name as sbatch reads it: `%` begins a symbol there."""
    # Slurm puts its working directory in front, so that only what comes after it need be harmless.
    inside = run_dir.is_relative_to(directory)
    pattern = str(run_dir.relative_to(directory) if inside else run_dir).replace("%", "%%")
    if "\\" in f"{directory}{run_dir}":
        raise UsageError(
            f"{run_dir} has a backslash in it, where Slurm does not expand names of files",
            hint="--run-dir DIR names another place, or work in another directory",
        )
    return str(output_file(Path(pattern), "%j"))


def _quoted_option(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={_quoted(value)}" if equals else _quoted(option)


def _quoted(text: str) -> str:
    """Quote `text` the way sbatch reads its directives: like a shell, but without expansions."""
    if text and shlex.quote(text) == text:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)
