"""Submit jobs to Kubernetes: write manifests as YAML, and call `kubectl`."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.tools.submit.backend import (
    Backend,
    JobState,
    NoAnswerError,
    Submission,
    UnknownJobError,
    call,
)
from lockstep.tools.submit.kubernetes_manifests import KINDS, PodOptions, check_name, name_of
from lockstep.tools.submit.kubernetes_state import parse
from lockstep.tools.submit.request import JobRequest

_NEEDED = {
    "image": "name an image with Lockstep in it: --image REGISTRY/NAME:TAG",
    "memory": "admission policies refuse pods without limits. For the model, the data, twice the state of "
    "model and optimizer (snapshots), and the batches of loader workers: --memory 32Gi",
    "volume": "checkpoints lie there, and each pod must see those of the others: --volume CLAIM:/PATH",
}
#: Start of a line of kubectl's own log, as in `E1124 19:43:47.751978 …`.
_LOGGED = re.compile(r"[EWIF][0-9]{4} ")
_HEADER = """\
# Written by `lockstep submit`; `kubectl apply -f FILE` takes it as it is, and as you change it.
"""


class Kubernetes(Backend):
    """Backend that submits jobs to Kubernetes, as Job, JobSet, TrainJob or PyTorchJob."""

    title = "Kubernetes"
    program = "kubectl"
    is_remote = True

    def add_flags(self, group: argparse._ActionsContainer) -> None:
        """Add the flags that describe a pod to `group`."""
        add = group.add_argument
        add(
            "--kubernetes",
            choices=tuple(KINDS),
            metavar="KIND",
            help=f"run on Kubernetes, as one of {', '.join(KINDS)}",
        )
        add("--image", metavar="I", help="image of the containers, with Lockstep in it")
        add("--memory", metavar="SIZE", help="memory of each pod, such as 32Gi")
        add(
            "--volume",
            metavar="CLAIM:PATH",
            help="volume claim that all pods share, and where they mount it; run directories lie there",
        )
        add("--namespace", metavar="NS", help="namespace (default: that of kubectl)")
        add(
            "--min-nodes",
            type=int,
            metavar="M",
            help="pods with which the run continues while others are replaced (default: 1)",
        )
        add(
            "--rdzv-endpoint",
            metavar="E",
            help="rendezvous of the pods, such as file:///PATH in the volume, with which any pod may be "
            "lost (default: pod 0)",
        )
        add("--user", type=int, metavar="ID", help="user id in the containers (default: 1000)")
        add("--apply", action="store_true", help="give the manifests to kubectl")

    def options(self, options: argparse.Namespace) -> PodOptions:
        """Return the options of pods from the parsed command-line flags."""
        for name, hint in _NEEDED.items():
            if not getattr(options, name):
                raise UsageError(f"--{name} is missing; Kubernetes needs it", hint=hint)
        if options.apply and options.dry_run:
            raise UsageError(
                "--apply and --dry-run contradict each other; expected one of them",
                hint="--dry-run prints the manifests, --apply gives them to kubectl",
            )
        if options.time is not None:
            raise UsageError(
                "--time has no meaning on Kubernetes, where a job has no time limit",
                hint="--save-before SECONDS is the time between SIGTERM and SIGKILL (default: 90)",
            )
        least = 1 if options.min_nodes is None else options.min_nodes
        if not 1 <= least <= options.nodes:
            raise UsageError(
                f"--min-nodes is {least} with --nodes {options.nodes}; expected 1 to {options.nodes}"
            )
        claim, _, mount = options.volume.partition(":")
        return PodOptions(
            kind=_kind(options),
            image=options.image,
            memory=options.memory,
            claim=claim,
            mount=mount,
            least=least,
            endpoint=options.rdzv_endpoint,
            namespace=options.namespace,
            user=1000 if options.user is None else options.user,
        )

    def name(self, text: str, *, chosen: bool) -> str:
        """Return `text` if the user has chosen it, else a name made from it that Kubernetes accepts."""
        if chosen:
            check_name("--job-name", text)
        return text if chosen else name_of(text)

    def default_run_dir(self, request: JobRequest, run: str) -> Path:
        """Return the default run directory of a job, in the volume that all pods of the job share.

        It is named after the job. The argument `run` is not used.
        """
        del run
        return Path(_options(request).mount) / "runs" / request.name

    def script(self, request: JobRequest, run_dir: Path) -> str:
        """Return the Kubernetes manifests of a job as YAML; equal requests give equal texts.

        `run_dir` has to be in the volume that all pods share.
        """
        options = _options(request)
        if not run_dir.is_relative_to(options.mount):
            raise UsageError(
                f"--run-dir is {run_dir}; expected a directory in the volume at {options.mount}",
                hint="a directory of a pod's own is lost with the pod, and other pods do not see it",
            )
        return _HEADER + _yaml(KINDS[options.kind].make(request, options, str(run_dir)))

    def submit(self, script: Path) -> Submission:
        """Create the Kubernetes objects in the manifests of the file `script`, with `kubectl apply`.

        Return the output of `kubectl` in place of a job id, and its warnings.
        """
        try:
            done = _call("apply", "--filename", str(script))
        except NoAnswerError as error:
            raise UsageError(f"kubectl did not take the job: {error}") from None
        if done.returncode:
            raise UsageError(
                f"kubectl did not take the job: {_words(done.stderr) or 'it gives no reason'}",
                hint=_hint(done.stderr),
            )
        return Submission(done.stdout.strip().replace("\n", ", "), _words(done.stderr))

    def job_id(self, name: str, options: argparse.Namespace) -> str:
        """Return the id `NAMESPACE/KIND/NAME` of a job; the first part is empty without `--namespace`."""
        check_name("the job's name", name)
        return f"{options.namespace or ''}/{_kind(options)}/{name}"

    def state(self, job: str) -> JobState:
        """Return the state of the job with the id `job`, read with `kubectl get`."""
        namespace, kind, name = _parts(job)
        answer = _json("get", f"{KINDS[kind].objects[0]}/{name}", *namespace)
        pods = _json("get", "pods", "--selector", f"{KINDS[kind].label}={name}", *namespace)
        return parse(answer, pods.get("items", []))

    def output(self, run_dir: Path, job: str) -> Path:
        """Return `run_dir`: on Kubernetes there is no output file, and `logs` prints the output."""
        return run_dir

    def logs(self, job: str) -> int:
        """Print the output of a job's pods until the job ends; return the exit code of `kubectl logs`."""
        namespace, kind, name = _parts(job)
        self.state(job)  # raises an error for an unknown job
        of_job = ("--selector", f"{KINDS[kind].label}={name}", *namespace)
        words = ("logs", *of_job, "--follow", "--prefix", "--tail=-1", "--max-log-requests=64")
        return subprocess.run(
            [_program(), *words], stdin=subprocess.DEVNULL, check=False
        ).returncode

    def cancel(self, job: str) -> str:
        """Delete a job; return the message of `kubectl`.

        The job's pods get SIGTERM, upon which they save the run's state.
        """
        namespace, kind, name = _parts(job)
        resources = [f"{resource}/{name}" for resource in KINDS[kind].objects]
        done = _call("delete", *resources, *namespace, "--wait=false")
        if done.returncode and "deleted" not in done.stdout:
            _raise(job, done.stderr)
        return done.stdout.strip().replace("\n", ", ")

    def commands(self, job: str = "") -> str:
        """Return a text with shell commands that show and cancel a job, or list jobs if `job` is empty."""
        if not job:
            return "kubectl get jobs"
        namespace, kind, name = _parts(job)
        own = " ".join(["lockstep submit --kubernetes", kind, *namespace])
        return f"state: {own} --status {name} · output: {own} --logs {name} · cancel: {own} --cancel {name}"


BACKEND = Kubernetes()


def _options(request: JobRequest) -> PodOptions:
    assert isinstance(request.options, PodOptions), "made by this backend"
    return request.options


def _kind(options: argparse.Namespace) -> str:
    return options.kubernetes or "job"


def _parts(job: str) -> tuple[tuple[str, ...], str, str]:
    """Split a job's id `NAMESPACE/KIND/NAME`; return the `--namespace` flag for kubectl, kind and name."""
    namespace, kind, name = job.split("/")
    return (("--namespace", namespace) if namespace else ()), kind, name


def _yaml(manifests: list[dict[str, Any]]) -> str:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "manifests of Kubernetes need the package PyYAML, which is not installed",
            hint="pip install 'torch-lockstep[kubernetes]'",
        ) from None
    # Through JSON, which repeats equal parts: YAML would write an object's second place as a reference.
    copied = json.loads(json.dumps(manifests))
    return str(yaml.safe_dump_all(copied, sort_keys=False, width=1000))


def _program() -> str:
    """Return the name of the command of Kubernetes; raise `UsageError` if it is not on PATH."""
    if shutil.which("kubectl") is None:
        raise UsageError(
            "there is no kubectl on PATH; expected the command of Kubernetes",
            hint="use a machine from which the cluster takes jobs; --dry-run prints the manifests",
        )
    return "kubectl"


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    return call(_program(), *words, "--request-timeout=20s")


def _json(*words: str) -> dict[str, Any]:
    done = _call(*words, "--output", "json")
    if done.returncode:
        _raise(words[1].rpartition("/")[2], done.stderr)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise NoAnswerError(f"kubectl said {done.stdout[:200]!r}") from None
    return answer


def _raise(job: str, stderr: str) -> None:
    if "(NotFound)" in stderr:
        raise UnknownJobError(job)
    raise NoAnswerError(_words(stderr) or "it gives no reason")


def _words(text: str) -> str:
    """Return `text`, which kubectl wrote to stderr, as one line, without its log messages."""
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line and not _LOGGED.match(line))


def _hint(stderr: str) -> str:
    if "no matches for kind" in stderr:
        return "the cluster lacks this kind: install its operator, or use --kubernetes job"
    if "already exists" in stderr or "immutable" in stderr:
        return "a job with this name exists: --job-name NAME, or --cancel the other one"
    return "kubectl cluster-info shows if the cluster can be reached from here, and as whom"
