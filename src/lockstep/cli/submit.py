"""`lockstep submit`: run a script as a job of Slurm or Kubernetes, and show or cancel the job."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lockstep.cli import setting_flags
from lockstep.cli.parser import RANKS, Parser, of_script
from lockstep.errors import UsageError
from lockstep.tools.submit import backends

if TYPE_CHECKING:
    from lockstep.launch.spec import LaunchSpec
    from lockstep.tools.submit.backend import Backend
    from lockstep.tools.submit.request import JobRequest

HELP = "run a script as a job of Slurm or Kubernetes"
USAGE = "[options] SCRIPT [ARG ...]"
EPILOG = """\
Everything after SCRIPT belongs to the script. Exit codes: that of the job; 2 if there is none; 130
if Ctrl-C ended the command and left the job running.
"""
EXAMPLES = {
    "lockstep submit --nodes 2 -n 4 --time 2:00:00 train.py": "2 nodes of 4 ranks, for two hours",
    "lockstep submit --dry-run --nodes 2 -n 4 train.py": "show the job script",
    "lockstep submit --kubernetes job --image I --memory 32Gi --volume CLAIM:/data --nodes 2 train.py": (
        "print manifests of Kubernetes; --apply gives them to kubectl"
    ),
}


#: Flags for a job that exists, in place of a script.
_ACTIONS = {
    "status": "print the state of a job; the exit code is that of a job that has failed",
    "logs": "print the output of a job until its end",
    "cancel": "cancel a job: its run saves its state",
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
    for name, what in _ACTIONS.items():
        parser.add_argument(f"--{name}", metavar="JOB", help=what)
    parser.add_script(optional=True)


def handle(options: argparse.Namespace) -> int:
    """Submit the script as a job, and follow it unless `--no-follow`; return the exit code."""
    from lockstep.tools.submit import job

    name = "kubernetes" if options.kubernetes else options.backend
    backend = backends.load(name)
    _check_flags(options, name)
    asked = {action: getattr(options, action) for action in _ACTIONS if getattr(options, action)}
    if asked:
        return _act(backend, asked, options)
    if options.target is None:
        raise UsageError(
            "the following arguments are required: SCRIPT", hint="see lockstep submit --help"
        )
    spec = _spec(options, backend)
    request = _request(options, spec, backend)
    run_dir = (spec.run_dir or backend.default_run_dir(request, spec.name)).absolute()
    if options.dry_run or (backend.is_remote and not options.apply):
        print(backend.script(request, run_dir), end="")
        return 0
    if backend.is_remote:
        job.submit_remote(backend, request, run_dir, backend.job_id(request.name, options))
        return 0
    number, output = job.submit(backend, request, spec.run_dir, spec.name)
    if options.no_follow:
        print(number)
        return 0
    return job.JobFollower(backend, number, output).follow()


def _act(backend: Backend, asked: dict[str, str], options: argparse.Namespace) -> int:
    """Show or cancel an existing job; return the exit code.

    `asked` maps the name of the given flag, `status`, `logs` or `cancel`, to the job's name.

    Raises:
        UsageError: if several of these flags are given, or a script too.
    """
    from lockstep.tools.submit import job

    if len(asked) > 1 or options.target is not None:
        given = " and ".join(
            [f"--{action}" for action in asked] + ["SCRIPT"] * bool(options.target)
        )
        raise UsageError(f"{given} contradict each other; expected one of them")
    ((action, name),) = asked.items()
    return job.act(backend, action, name, backend.job_id(name, options))


def _check_flags(options: argparse.Namespace, chosen: str) -> None:
    """Raise `UsageError` if a flag of a job scheduler other than `chosen` is given."""
    for name in backends.names():
        if name == chosen:
            continue
        only = argparse.ArgumentParser(add_help=False)
        backends.load(name).add_flags(only)
        for action in only._actions:
            if getattr(options, action.dest) != action.default:
                raise UsageError(
                    f"{action.option_strings[-1]} is a flag of {name}, and the backend is {chosen}",
                    hint="--kubernetes KIND runs on Kubernetes; without it, a job goes to Slurm",
                )


def _spec(options: argparse.Namespace, backend: Backend) -> LaunchSpec:
    """Return the options of the `lockstep run` that the job executes on each node.

    They are checked here, before the job is submitted.

    Raises:
        UsageError: if a flag is invalid, or the script does not exist. The script of a remote
            backend is in its image, and is not looked for.
    """
    from lockstep.launch.flag_settings import FlagSettings
    from lockstep.launch.spec import LaunchSpec, parse_ranks
    from lockstep.launch.target.source import check_script

    if not options.module and not backend.is_remote:  # else it is in the image
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
        name=backend.name(options.job_name or spec.name, chosen=options.job_name is not None),
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
        "(default: 90, or a quarter of a shorter limit); on Kubernetes, time between SIGTERM and SIGKILL",
    )
    add("-J", "--job-name", metavar="NAME", help="default: the script's name")
    add(
        "--gpus-per-node",
        "--gpus",
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
