"""Determine the state of a Kubernetes job from the JSON of `kubectl get` for the job and its pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.tools.submit.backend import JobState
from lockstep.tools.submit.kubernetes_manifests import NO_COMMAND, ON_SIGNAL

_DONE = ("Complete", "Completed", "Succeeded")
#: Reasons for which a container waits although nothing is wrong.
_STARTS = ("ContainerCreating", "PodInitializing")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_NO_LOCKSTEP = "the image has no `lockstep` on PATH: pip install torch-lockstep in it"
_PULL = "does the image exist, and may the cluster pull it?"
_MEMORY = "--memory SIZE asks for more: snapshots take twice the state of model and optimizer"


def parse(job: dict[str, Any], pods: Sequence[dict[str, Any]]) -> JobState:
    """Return the state of a job from the JSON that `kubectl get` prints for the job and its pods."""
    restarts = sum(_is(pod, "Failed") for pod in pods)
    problem, hint = _problem(pods)
    for condition in job.get("status", {}).get("conditions", ()):
        if condition.get("status") != "True":
            continue
        if condition["type"] in _DONE:
            return JobState(phase="ended", text="is done", restarts=restarts, has_run=True)
        if condition["type"] == "Failed":
            why = condition.get("message") or condition.get("reason", "no reason is given")
            text = f"failed: {why}{problem and f'; {problem}'}"
            return JobState(phase="ended", text=text, hint=hint, restarts=restarts, exit_code=1)
        if condition["type"] == "Suspended":
            text = "is suspended: a queue such as Kueue lets it go, or `kubectl patch`"
            return JobState(phase="waiting", text=text, restarts=restarts)
    running = sum(_is(pod, "Running") for pod in pods)
    wanted = _pods_wanted(job)
    if running:
        count = (
            f"runs on {running} of {wanted} pods" if running < wanted else f"runs on {running} pods"
        )
        text = f"{count}{problem and f'; {problem}'}"
        return JobState(phase="running", text=text, hint=hint, restarts=restarts, has_run=True)
    text = f"waits: {problem}" if problem else "waits for its pods"
    return JobState(phase="waiting", text=text, hint=hint, restarts=restarts)


def _is(pod: dict[str, Any], phase: str) -> bool:
    return bool(pod.get("status", {}).get("phase") == phase)


def _pods_wanted(job: dict[str, Any]) -> int:
    """Return the number of pods in the spec of a Kubernetes job; `job` is the JSON of `kubectl get`."""
    spec = job.get("spec", {})
    if "pytorchReplicaSpecs" in spec:
        return sum(one["replicas"] for one in spec["pytorchReplicaSpecs"].values())
    if "trainer" in spec:
        return int(spec["trainer"]["numNodes"])
    for replicated in spec.get("replicatedJobs", ()):
        spec = replicated["template"]["spec"]
    return int(spec.get("completions", 1))


def _problem(pods: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return (problem, hint) of the newest pod that has a problem; two empty texts if none has.

    `pods` are in the JSON of `kubectl get`.
    """

    def created(pod: dict[str, Any]) -> str:
        return str(pod["metadata"].get("creationTimestamp", ""))

    for pod in sorted(pods, key=created, reverse=True):
        containers = pod.get("status", {}).get("containerStatuses", ())
        for found in filter(None, (_unscheduled(pod), *map(_of_container, containers))):
            what, hint = found
            return f"pod {pod['metadata']['name']}: {what}", hint
    return "", ""


def _unscheduled(pod: dict[str, Any]) -> tuple[str, str] | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason')}: {condition.get('message', '')}", ""
    return None


def _of_container(container: dict[str, Any]) -> tuple[str, str] | None:
    """Return (problem, hint) of a container that waits or has failed, or `None`.

    Failures before its last restart count, too. `container` is the status that `kubectl get` prints.
    """
    waiting = container.get("state", {}).get("waiting")
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
        "terminated"
    )
    if ended is not None and ended.get("exitCode", 0) not in (0, *ON_SIGNAL):
        return _of_end(ended)
    if waiting is None or waiting.get("reason") in _STARTS:
        return None
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _IMAGE:
        return f"{reason}: {message}", _PULL
    return f"{reason}: {message}", _NO_LOCKSTEP if "not found" in message else ""


def _of_end(ended: dict[str, Any]) -> tuple[str, str]:
    code, message = ended["exitCode"], ended.get("message", "")
    if code in NO_COMMAND or "executable file not found" in message:
        return f"exit code {code}: {message or 'the command was not found'}", _NO_LOCKSTEP
    if ended.get("reason") == "OOMKilled":
        return "it used more memory than its limit (OOMKilled)", _MEMORY
    return f"exit code {code} ({ended.get('reason', 'Error')})", ""
