"""`lockstep submit`: submit a script to Slurm as a job, and follow it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli import setting_flags
from lockstep.cli.parser import RANKS, Parser, of_script
from lockstep.errors import UsageError
from lockstep.tools.submit import backends

if TYPE_CHECKING:
    from lockstep.launch.spec import LaunchSpec
    from lockstep.tools.submit.backend import Backend
    from lockstep.tools.submit.request import JobRequest

HELP = "run a script as a job of Slurm"
USAGE = "[options] SCRIPT [ARG ...]"
EPILOG = """\
Everything after SCRIPT belongs to the script. Exit codes: that of the job; 2 if there is none; 130
if Ctrl-C ended the command and left the job running.
"""
EXAMPLES = {
    "lockstep submit --nodes 2 -n 4 --time 2:00:00 train.py": "2 nodes of 4 ranks, for two hours",
    "lockstep submit --dry-run --nodes 2 -n 4 train.py": "show the job script",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep submit` to its parser."""
    parser.synonyms = RANKS
    _add_job(parser.add_argument_group("job"))
    group = parser.add_argument_group("run")
    add = group.add_argument
    add(
        "-n",
        metavar="N",
        help="ranks on each node: a number, cpu (cores), gpu, or auto (default: 1)",
    )
    setting_flags.add(group, "replicas", "devices", "threads", "run_dir")
    add("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    setting_flags.add_training(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the job script and submit nothing"
    )
    parser.add_argument(
        "--no-follow", action="store_true", help="print the job's number and return"
    )
    parser.add_script("the script to run, or with -m a module")


def handle(options: argparse.Namespace) -> int:
    """Submit the script as a job, and follow it unless `--no-follow`; return the exit code."""
    from lockstep.tools.submit import job

    backend = backends.load(options.backend)
    spec = _spec(options)
    request = _request(options, spec, backend)
    if options.dry_run:
        run_dir = (spec.run_dir or Path("runs") / spec.name / "TIME").absolute()
        print(backend.script(request, run_dir), end="")
        return 0
    number, output = job.submit(backend, request, spec.run_dir, spec.name)
    if options.no_follow:
        print(number)
        return 0
    return job.JobFollower(backend, number, output).follow()


def _spec(options: argparse.Namespace) -> LaunchSpec:
    """Return the launch on each node, checked before the job is submitted.

    Raises:
        UsageError: if a flag is invalid, or the script does not exist.
    """
    from lockstep.launch.flag_settings import FlagSettings
    from lockstep.launch.spec import LaunchSpec, parse_ranks
    from lockstep.launch.target.source import check_script

    if not options.module:
        check_script(options.target)
    return LaunchSpec(
        target=options.target,
        kind="module" if options.module else "script",
        args=of_script(options.args),
        n=None if options.n is None else parse_ranks(options.n),
        settings=FlagSettings(**setting_flags.given(options, (*setting_flags.SHARED, "run_dir"))),
    )


def _request(options: argparse.Namespace, spec: LaunchSpec, backend: Backend) -> JobRequest:
    from lockstep.tools.submit.request import JobRequest

    if "" in (options.time, options.job_name):
        raise UsageError("--time or --job-name is empty; expected a value")
    words = setting_flags.words(options, setting_flags.SHARED)
    return JobRequest(
        name=options.job_name or spec.name,
        command=(spec.target, *spec.args),
        run_options=(*words, *(["-m"] if options.module else [])),
        nodes=options.nodes,
        ranks=spec.n,
        cpus_per_rank=options.cpus_per_task,
        gpus_per_node=options.gpus_per_node,
        time_limit=options.time,
        save_before=options.save_before,
        options=backend.options(options),
    )


def _add_job(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-N", "--nodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
    add("-t", "--time", metavar="T", help="time limit, such as 30 (minutes) or 2:00:00")
    add(
        "--save-before",
        type=int,
        metavar="SECONDS",
        help="how long before its time limit the job saves its state and goes back into the queue "
        "(default: 90, or a quarter of a shorter limit)",
    )
    add("-J", "--job-name", metavar="NAME", help="default: the script's name")
    add(
        "--gpus-per-node",
        metavar="G",
        help="GPUs of each node, such as 4 or a100:4; a rank for each",
    )
    add("--cpus-per-task", type=int, metavar="C", help="cores for each rank (default: 1)")
    add(
        "--backend",
        choices=backends.names(),
        default="slurm",
        metavar="NAME",
        help="system that runs the job (default: slurm)",
    )
    for name in backends.names():
        backends.load(name).add_flags(group)
