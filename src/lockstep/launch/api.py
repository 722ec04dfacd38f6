"""`run`: launch a script or module, as `lockstep run` does."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

from lockstep.errors import PREEMPTED
from lockstep.launch import dry_run, earlier_runs
from lockstep.launch.agent import worker
from lockstep.launch.agent.interrupts import Interrupted, listening
from lockstep.launch.agent.supervise import supervise
from lockstep.launch.devices import openmp
from lockstep.launch.functions import launch
from lockstep.launch.nodes.membership import LaunchEnded, Membership
from lockstep.launch.output import say
from lockstep.launch.plan import Generation, Launch, make_plan, resolve_here, threads_of_workers
from lockstep.launch.run_directory import RunDirectory, expected, private_directory
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import imports, old_scripts
from lockstep.launch.target.imports import Sources
from lockstep.launch.target.preload import likely, preload
from lockstep.launch.target.source import check

__all__ = ["launch", "run", "show_plan"]


def run(spec: LaunchSpec) -> int:
    """Run a launch until it ends; return the exit code.

    The message about a failure is printed to standard error.

    Raises:
        LockstepError: if the launch cannot start.
    """
    check(spec.kind, spec.target)
    spec = _adapted(spec)
    if (line := earlier_runs.finished(spec)) is not None:
        say(line)
        return 0
    spec = earlier_runs.resumed(spec, spec.name)
    with listening(spec.save_signals(os.environ)) as interrupts:
        sources = imports.read(spec)
        spec = _prepare(spec, sources)
        # Check everything before a directory is made.
        launch = resolve_here(spec, sources)
        if launch.ranks > 1 and (warning := old_scripts.warning(spec)) is not None:
            say(warning)
        if launch.ranks > 1 and sources.trains_alone:
            say(
                f"lockstep: warning: {spec.target} seems to make no lockstep.Run and no process group: "
                f"each of the {launch.ranks} ranks would train on all data by itself; hint: lockstep "
                f"convert {spec.target} writes a script whose ranks share the work"
            )
        place = RunDirectory(launch, spec.name)
        try:
            with private_directory() as private, place:
                verdict = supervise(launch, worker.job(launch), place, private, interrupts)
                place.keeps = verdict is not None and verdict.exit_code != PREEMPTED
                if verdict is None and place.path is not None:
                    earlier_runs.mark_complete(spec, place.path)
        except LaunchEnded:
            say("lockstep: the launch has ended; there was no place for this node meanwhile")
            return 0
        except Interrupted as stop:
            saved = place.path is not None and any(place.path.glob("checkpoints/step-*"))
            goes_on = "; the same command with --resume continues" if saved else ""
            say(f"lockstep: stopped by {stop.signum.name}{place.where}{goes_on}")
            return 128 + stop.signum
    if verdict is None:
        return 0
    if verdict.text:
        say(verdict.text)
    return verdict.exit_code


def show_plan(spec: LaunchSpec) -> int:
    """Print the commands that `run` would start, without starting them; return the exit code."""
    check(spec.kind, spec.target)
    spec = earlier_runs.resumed(_adapted(spec), spec.name)
    launch = resolve_here(spec, imports.read(spec))
    run_dir, log_dir = expected(launch)
    private = Path(tempfile.gettempdir()) / "lockstep-PRIVATE"
    generation = _expected_generation(launch)
    plan = make_plan(launch, generation, run_dir=run_dir, log_dir=log_dir, error_dir=private)
    print("\n".join(dry_run.lines(plan)))  # noqa: T201 - this is what --dry-run is for
    return 0


def _expected_generation(launch: Launch) -> Generation:
    """Return the `Generation` whose settings a dry run shows.

    The other nodes are not asked: each is expected to start as many ranks as this one.
    """
    if (nodes := launch.nodes) is None:
        return Generation(port=launch.spec.nodes.main_port or 0)
    return Generation(
        membership=Membership(
            index=nodes.index or 0,
            ranks=(launch.ranks,) * nodes.count,
            nodes=tuple(range(nodes.count)),
            names=("",) * nodes.count,
            address=nodes.address or "(found in the rendezvous)",
            interface=None,
        )
    )


def _adapted(spec: LaunchSpec) -> LaunchSpec:
    """Return `spec`, with the option `--local_rank` if the script is an old one that expects it.

    If the option is added, a message says so.
    """
    spec, note = old_scripts.adapt(spec)
    if note is not None:
        say(note)
    return spec


def _prepare(spec: LaunchSpec, sources: Sources) -> LaunchSpec:
    """Import torch before workers are forked; return `spec`, adapted if forks are unsafe.

    The start method is then `spawn`. `sources` are facts about the script's source, such as the packages
    that it imports.
    """
    if spec.start != "fork":
        return spec
    with openmp.loaded_unbound(threads_of_workers(spec)):
        reason = preload(likely(spec, sources, os.environ))
    if reason is None:
        if names := openmp.binding_variables(os.environ):
            say(
                f"lockstep: forked ranks do not read {', '.join(names)}; --bind cores gives each rank "
                "cores of its own, --start exec lets it read them"
            )
        return spec
    say(f"lockstep: workers are spawned, not forked: {reason}")
    return dataclasses.replace(spec, start="spawn")
