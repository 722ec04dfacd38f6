"""Submit jobs to Slurm: write scripts for sbatch, and call sbatch, scontrol, squeue and scancel."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import unicodedata
from pathlib import Path

from lockstep.errors import PREEMPTED, UsageError
from lockstep.tools.submit.backend import (
    Backend,
    JobState,
    NoAnswerError,
    Submission,
    UnknownJobError,
    call,
)
from lockstep.tools.submit.job import JobFollower
from lockstep.tools.submit.request import JobRequest

_OUTPUT = "slurm-{}.out"
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
#: Slurm's variables that configure its commands; the others describe a job around this process.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
#: Reasons for which a job stays pending until the user acts, and what to do.
_STUCK = {
    "BadConstraints": "ask for what some node has",
    "JobHeldAdmin": "an administrator holds it: ask why",
    "JobHeldUser": "scontrol release lets it go",
    "PartitionNodeLimit": "ask for fewer --nodes",
    "PartitionTimeLimit": "ask for less --time",
}
_HINTS = {
    "TIMEOUT": "--time T asks for more",
    "OUT_OF_MEMORY": "--sbatch=--mem=SIZE asks for more",
}
#: Options of sbatch that `lockstep submit` sets itself, and what to do instead.
_OURS = {
    "array": "submit once for each run",
    "cpus-per-task": "--cpus-per-task of submit itself says it, for each rank",
    "error": "errors and output come in one file, in order",
    "nodes": "--nodes of submit itself says it",
    "ntasks": "-n sets the ranks of each node",
    "ntasks-per-node": "-n sets the ranks of each node",
    "output": "--run-dir DIR says where the output goes",
    "signal": "--save-before SECONDS says when the run is told to save itself",
    "test-only": "--dry-run prints the job script and submits nothing",
    "wait": "without --no-follow, the job's end is waited for",
    "wrap": "name a script of Python",
}
_SHORT = {
    "a": "array",
    "c": "cpus-per-task",
    "e": "error",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "W": "wait",
}
#: Seconds after the exit of the first launcher at which Slurm kills the others.
_LAST_SECONDS = 60
#: The signal that Slurm sends before it ends the job. Not SIGTERM, which also cancels a job.
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


class Slurm(Backend):
    """Backend that submits jobs to the job scheduler Slurm."""

    title = "Slurm"
    program = "sbatch"

    def add_flags(self, group: argparse._ActionsContainer) -> None:
        """Add the flags for partition, account and other options of sbatch to `group`."""
        group.add_argument(
            "-p", "--partition", metavar="P", help="partition (default: the cluster's)"
        )
        group.add_argument("-A", "--account", metavar="A", help="account to charge")
        group.add_argument(
            "--sbatch",
            action="append",
            default=[],
            metavar="OPTION",
            help="any other option of sbatch, such as --sbatch=--qos=high; may be repeated",
        )

    def options(self, options: argparse.Namespace) -> tuple[str, ...]:
        """Return options of sbatch from the parsed command-line flags; those of `--sbatch` come last."""
        named = {"partition": options.partition, "account": options.account}
        given = {name: value for name, value in named.items() if value is not None}
        for name, value in given.items():
            if not value:
                raise UsageError(f"--{name} is empty; expected a name")
        for option in options.sbatch:
            _check_option(option)
        return (*(f"--{name}={value}" for name, value in given.items()), *options.sbatch)

    def script(self, request: JobRequest, run_dir: Path) -> str:
        """Return the job script for sbatch; equal requests give equal texts."""
        # These texts appear in directives, where line breaks cannot be quoted.
        paths = (str(request.directory), str(run_dir), request.python)
        for text in (*paths, *request.run_options):
            # A control character could end the line, and sbatch would read another directive.
            if any(unicodedata.category(one) in ("Cc", "Zl", "Zp", "Cs") for one in text):
                raise UsageError(
                    f"{text!r} has a control character, and cannot stand in a job script",
                    hint="rename the directory, or work in another one",
                )
        return "\n".join(
            [
                "#!/bin/bash",
                "# Written by `lockstep submit`; `sbatch` takes it as it is, and as you change it.",
                *(f"#SBATCH {option}" for option in _directives(request, run_dir)),
                "",
                "# One launcher on each node starts the ranks of that node.",
                f"{_step(request)} \\",
                f"  {shlex.join(_launcher(request, run_dir))}",
                _REQUEUE,
            ]
        )

    def submit(self, script: Path) -> Submission:
        """Submit the job script in the file `script` with sbatch; return the job's id, and warnings."""
        if shutil.which("sbatch") is None:
            raise UsageError(
                "there is no sbatch on PATH; expected the commands of Slurm",
                hint="use a machine from which the cluster takes jobs; --dry-run prints the job script",
            )
        try:
            done = _call("sbatch", "--parsable", str(script))
        except NoAnswerError as error:
            raise UsageError(f"sbatch did not take the job: {error}") from None
        if done.returncode:
            raise UsageError(
                f"sbatch did not take the job: {_words(done.stderr) or 'it gives no reason'}",
                hint="sinfo lists the partitions, sacctmgr show associations the accounts",
            )
        return Submission(done.stdout.strip().partition(";")[0], _words(done.stderr))

    def state(self, job: str) -> JobState:
        """Return the state of the job with the id `job`, read with `scontrol`."""
        return parse(_show(job), job)

    def output(self, run_dir: Path, job: str) -> Path:
        """Return the path of the file in `run_dir` to which the job with the id `job` writes its output."""
        return run_dir / _OUTPUT.format(job)

    def logs(self, job: str) -> int:
        """Print the output file of a job and follow it until the job ends; return the job's exit code."""
        return JobFollower(self, job, Path(_field(_show(job), "StdOut"))).follow()

    def cancel(self, job: str) -> str:
        """Cancel a job with scancel; return the error output of scancel."""
        self.state(job)  # scancel says nothing of an unknown job
        return _words(_call("scancel", job).stderr)

    def commands(self, job: str = "") -> str:
        """Return a text with shell commands that show and cancel a job, or list jobs if `job` is empty."""
        return f"state: squeue -j {job} · cancel: scancel {job}" if job else "squeue --me"


BACKEND = Slurm()


def parse(text: str, job: str) -> JobState:
    """Parse `text`, the output of `scontrol show job` for the job `job`; return the state of the job.

    Raises:
        NoAnswerError: if the text cannot be parsed.
    """
    try:
        code, ended_by = map(int, _field(text, "ExitCode").split(":"))
        restarts = int(_field(text, "Restarts"))
        names = ("JobState", "Reason", "NodeList", "TimeLimit")
        state, reason, nodes, limit = (_field(text, name) for name in names)
    except ValueError:
        raise NoAnswerError(f"scontrol said {text[:200]!r}") from None
    if state in _PENDING and reason in _STUCK:
        why, hint = f"will not start as it is: {reason}", f"{_STUCK[reason]}, or scancel {job}"
        return JobState(phase="waiting", text=why, hint=hint, restarts=restarts)
    if state in _PENDING:
        why = "" if reason == "None" else f": {reason}"
        return JobState(phase="waiting", text=f"waits{why}", restarts=restarts)
    if state == "COMPLETING":
        return JobState(phase="ending", restarts=restarts)
    if state in _RUNNING:
        does = f"runs on {nodes}" if state == "RUNNING" else f"is {state.lower()}"
        return JobState(phase="running", text=does, restarts=restarts)
    failed = f"failed with exit code {code} ({reason})"
    how = {
        "COMPLETED": "is done",
        "FAILED": f"was ended by signal {ended_by}" if ended_by else failed,
        "CANCELLED": "was cancelled",
        "TIMEOUT": f"was stopped at its time limit of {limit}",
        "OUT_OF_MEMORY": "was killed: it used more memory than it asked for",
        "NODE_FAIL": f"ended because a node failed ({nodes})",
        "PREEMPTED": "was preempted by another job",
        "DEADLINE": "was stopped at its deadline",
        "BOOT_FAIL": "could not start: a node did not boot",
    }.get(state, f"ended as {state} ({reason})")
    # As a shell does, return 128 plus the signal.
    failure = code or (128 + ended_by if ended_by else 1)
    return JobState(
        phase="ended",
        text=how,
        hint=_HINTS.get(state, ""),
        restarts=restarts,
        exit_code=0 if state == "COMPLETED" else failure,
        has_run=nodes not in ("", "(null)"),
    )


def _field(text: str, name: str) -> str:
    # The first line has the job's name, which may contain anything.
    found = re.search(rf"[ ]{name}=(\S*)", text.partition("\n")[2])
    if found is None:
        raise ValueError(name)
    return found[1]


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    # Without the variables of a surrounding job, which srun would take for options.
    kept = {name for name in os.environ if not name.startswith("SLURM") or name in _KEPT}
    return call(*words, environ={name: os.environ[name] for name in kept})


def _show(job: str) -> str:
    """Return the output of `scontrol show job`.

    Raises:
        UnknownJobError: if Slurm has no such job.
        NoAnswerError: if Slurm does not answer.
    """
    done = _call("scontrol", "show", "job", job)
    if "Invalid job id" in done.stderr:
        raise UnknownJobError(job)
    if done.returncode:
        raise NoAnswerError(_words(done.stderr))
    return done.stdout


def _words(text: str) -> str:
    """Return the error messages in the output `text` of a Slurm command as one line."""
    lines = (re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in text.splitlines())
    return "; ".join(line for line in lines if line)


def _check_option(option: str) -> None:
    found = re.match(r"--([a-z][a-z-]*)|-([A-Za-z])", option)
    if found is None:
        raise UsageError(
            f"--sbatch is {option!r}; expected an option of sbatch",
            hint="as in --sbatch=--qos=high",
        )
    name = found[1] or _SHORT.get(found[2], "")
    if name in _OURS:
        raise UsageError(f"--sbatch={option} cannot be combined with this", hint=_OURS[name])


def _directives(request: JobRequest, run_dir: Path) -> list[str]:
    named = [
        ("job-name", request.name),
        ("nodes", request.nodes),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", request.cpus_per_node),
        ("gpus-per-node", request.gpus_per_node),
        ("time", request.time_limit),
        ("chdir", str(request.directory)),
        ("output", _pattern(run_dir, request.directory)),
        # A requeued job continues the same file.
        ("open-mode", "append"),
    ]
    own = [f"--{name}={_quoted(str(value))}" for name, value in named if value is not None]
    # The signal goes to the job's steps, not to its script, which waits for them. The user's options come
    # last: of equal options sbatch takes the last.
    own += ["--requeue", f"--signal={_NAME}@{request.seconds_to_save}"]
    for option in request.options:
        name, equals, value = option.partition("=")
        own.append(f"{name}={_quoted(value)}" if equals else _quoted(option))
    return own


def _step(request: JobRequest) -> str:
    words = ["srun", f"--nodes={request.nodes}", f"--ntasks={request.nodes}", "--ntasks-per-node=1"]
    if request.cpus_per_node is not None:
        # Since Slurm 22.05 a step does not inherit this option from the job.
        words.append(f"--cpus-per-task={request.cpus_per_node}")
    # Launchers end each other when a rank fails; Slurm must not kill the one that prints the reason.
    return shlex.join([*words, "--kill-on-bad-exit=0", f"--wait={_LAST_SECONDS}"])


def _launcher(request: JobRequest, run_dir: Path) -> list[str]:
    number = [] if request.ranks_option is None else ["-n", str(request.ranks_option)]
    own = ["--run-dir", str(run_dir), "--preempt-signal", _NAME]
    options = [*number, *own, *request.run_options]
    return [request.python, "-m", "lockstep", "run", *options, *request.command]


def _pattern(run_dir: Path, directory: Path) -> str:
    """Return the path of a job's output file as a pattern for sbatch's `--output`, with `%` escaped.

    `directory` is the working directory of the job.
    """
    # Slurm prepends the working directory, so only the rest of the path needs escaping.
    inside = run_dir.is_relative_to(directory)
    pattern = str(run_dir.relative_to(directory) if inside else run_dir).replace("%", "%%")
    if "\\" in f"{directory}{run_dir}":
        raise UsageError(
            f"{run_dir} has a backslash in it, where Slurm does not expand names of files",
            hint="--run-dir DIR names another place, or work in another directory",
        )
    return str(Path(pattern) / _OUTPUT.format("%j"))


def _quoted(text: str) -> str:
    """Quote `text` as one word of an `#SBATCH` line, in double quotes if it needs any.

    Only `"` and backslash are escaped.
    """
    if text and shlex.quote(text) == text:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
