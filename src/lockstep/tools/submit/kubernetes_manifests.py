"""Make the Kubernetes manifests of a job, as plain dicts: Job, JobSet, TrainJob or PyTorchJob.

All kinds share the pod template and its command, `lockstep run`; a `Kind` has the differences. One pod is
one node of the run. A pod that is lost, evicted or preempted is replaced alone: the other pods keep the
run's state in memory, and the new pod joins them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import PREEMPTED, UsageError
from lockstep.tools.submit.request import JobRequest

Manifest = dict[str, Any]

#: Longest name of a job: the longest name of a pod, `NAME-node-0-INDEX-xxxxx`, has 63 characters at most.
_LONGEST = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)")
#: Exit codes of a launcher that ended on a signal, which is no failure: the run's state is saved, or the
#: signal came before there was a state, or the other pods continue with it.
ON_SIGNAL = (PREEMPTED, 128 + 15)
#: Exit codes of a container runtime: the command cannot be executed, or does not exist in the image.
NO_COMMAND = (126, 127)
#: Failures of pods, for each pod of a job, after which the job fails.
_FAILURES_PER_POD = 10
_HOME = "/home/lockstep"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Options that only jobs on Kubernetes have.

    Attributes:
        kind: name of the kind of job, such as `jobset`.
        memory: memory of each pod, as a quantity of Kubernetes such as `32Gi`.
        claim: name of the volume claim that all pods share; the run directory lies there.
        mount: absolute path of the volume in each pod.
        least: smallest number of pods with which the run continues.
        endpoint: rendezvous of the launchers, as `--rdzv-endpoint`; `None` for the host of pod 0.
        user: numeric id of the user in the containers.
    """

    kind: str
    image: str
    memory: str
    claim: str
    mount: str
    least: int = 1
    endpoint: str | None = None
    namespace: str | None = None
    user: int = 1000

    def __post_init__(self) -> None:
        if not _QUANTITY.fullmatch(self.memory):
            raise UsageError(
                f"--memory is {self.memory!r}; expected a number and a unit, k, M, G, T, Ki, Mi, Gi or Ti",
                hint="for example --memory 32Gi",
            )
        check_name("the claim in --volume", self.claim, longest=63)
        if not self.mount.startswith("/") or ":" in self.mount or self.mount == "/":
            raise UsageError(
                f"--volume mounts {self.claim} at {self.mount!r}; expected an absolute path"
            )
        if self.namespace is not None:
            check_name("--namespace", self.namespace, longest=63)
        if self.user < 1:
            raise UsageError(
                f"--user is {self.user}; expected at least 1: containers do not run as root"
            )


def check_name(what: str, name: str, *, longest: int = _LONGEST) -> None:
    """Raise `UsageError` if Kubernetes does not accept `name` as the name of an object.

    `what` describes the name in the error message. `longest` is the largest number of characters.
    """
    if not _NAME.fullmatch(name) or len(name) > longest:
        raise UsageError(
            f"{what} is {name!r}; expected a-z, 0-9 and -, a letter first, a letter or digit last, and at "
            f"most {longest} characters",
            hint="these are the names of Kubernetes (DNS-1123)",
        )


def name_of(text: str) -> str:
    """Return a name that Kubernetes accepts for a job, made from `text`, the name of a script."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:_LONGEST].strip("-")


def _labels(request: JobRequest) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "lockstep", "app.kubernetes.io/instance": request.name}


def _object(
    version: str, kind: str, request: JobRequest, options: PodOptions, spec: Manifest
) -> Manifest:
    metadata: Manifest = {"name": request.name, "labels": _labels(request)}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _command(request: JobRequest, options: PodOptions, run_dir: str, kind: Kind) -> list[str]:
    """Return the `lockstep run` command of each pod's container, as a list of words, not quoted.

    `kind` is the kind of the job. Each `$` in the user's words is doubled, since Kubernetes expands
    `$(NAME)`.
    """
    own = ["lockstep", "run"]
    if request.nodes > 1:
        own += ["--nnodes", f"{options.least}:{request.nodes}"]
        if options.endpoint is not None:
            own += ["--rdzv-endpoint", options.endpoint]
        else:
            host = kind.first_pod.format(request.name)
            own += ["--node-rank", f"$({kind.index})", "--master-addr", host]
    ranks = 1 if request.ranks_option is None else request.ranks_option
    own += ["-n", str(ranks), "--run-dir", run_dir]
    # Kubernetes expands $(NAME), and reads $$ as $.
    given = [*request.run_options, *request.command]
    return [*own, *(word.replace("$", "$$") for word in given)]


def _resources(request: JobRequest, options: PodOptions) -> Manifest:
    """Return a pod's memory, cores and GPUs as Kubernetes resources.

    The requests equal the limits, so that the pod is evicted last.
    """
    if request.cpus_per_node is None:
        raise UsageError(
            f"-n is {request.ranks}; expected a number: the limits of a pod have a number of cores",
            hint="-n R and --cpus-per-task C ask for R times C cores",
        )
    limits = {"memory": options.memory, "cpu": str(request.cpus_per_node)}
    if request.gpus_per_node is not None:
        kind, colon, number = request.gpus_per_node.rpartition(":")
        if colon and "/" not in kind:
            raise UsageError(
                f"--gpus is {request.gpus_per_node!r}; expected a number, or a resource of Kubernetes",
                hint="for example --gpus 4 (nvidia.com/gpu), or --gpus amd.com/gpu:4",
            )
        limits[kind or "nvidia.com/gpu"] = number
    return {"limits": limits, "requests": dict(limits)}


def _pod_template(
    request: JobRequest, options: PodOptions, run_dir: str, kind: Kind, container: str = "node"
) -> Manifest:
    """Return the template of a job's pods, which satisfies the Pod Security Standard `restricted`."""
    empty = {"tmp": "/tmp", "home": _HOME, "shm": "/dev/shm"}  # noqa: S108 - paths in a container
    mounts = [*empty.items(), ("data", options.mount)]
    volumes: list[Manifest] = [{"name": name, "emptyDir": {}} for name in empty]
    # The container's default is 64 MB, too little for the batches of loader workers.
    volumes[-1]["emptyDir"] = {"medium": "Memory"}
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": options.claim}}
    # Without an entry in /etc/passwd, these variables are all that names the user.
    environ = {"HOME": _HOME, "USER": "lockstep", "PYTHONUNBUFFERED": "1"}
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.seconds_to_save,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": options.image,
                "command": _command(request, options, run_dir, kind),
                "env": [{"name": name, "value": value} for name, value in environ.items()],
                "resources": _resources(request, options),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts],
            }
        ],
        "volumes": [*volumes, claim],
    }
    return {"metadata": {"labels": _labels(request)}, "spec": spec}


def _job_spec(request: JobRequest, template: Manifest) -> Manifest:
    """Return the spec of an Indexed Job with `template` for its pods.

    A lost pod is replaced while the others continue.
    """
    return {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": _FAILURES_PER_POD * request.nodes,
        # A new pod starts after the old one has ended: no two launchers have one index.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "Ignore",
                    "onExitCodes": {"operator": "In", "values": list(ON_SIGNAL)},
                },
                {
                    "action": "FailJob",
                    "onExitCodes": {"operator": "In", "values": list(NO_COMMAND)},
                },
            ]
        },
        # A launcher exits with 0 after the ranks of all launchers have ended: a pod that was replaced
        # shortly before that has nothing to do any more.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": template,
    }


def _job(request: JobRequest, options: PodOptions, run_dir: str) -> list[Manifest]:
    template = _pod_template(request, options, run_dir, KINDS["job"])
    made = []
    if request.nodes > 1:
        template["spec"]["subdomain"] = request.name
        service = {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "publishNotReadyAddresses": True,
        }
        made.append(_object("v1", "Service", request, options, service))
    return [*made, _object("batch/v1", "Job", request, options, _job_spec(request, template))]


def _replicated_job(request: JobRequest, options: PodOptions, run_dir: str, kind: Kind) -> Manifest:
    template = _pod_template(request, options, run_dir, kind)
    return {"name": "node", "replicas": 1, "template": {"spec": _job_spec(request, template)}}


def _jobset(request: JobRequest, options: PodOptions, run_dir: str) -> list[Manifest]:
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [_replicated_job(request, options, run_dir, KINDS["jobset"])],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", request, options, spec)]


def _trainjob(request: JobRequest, options: PodOptions, run_dir: str) -> list[Manifest]:
    """Return the manifests of a TrainJob, and of the TrainingRuntime that it refers to."""
    version = "trainer.kubeflow.org/v1alpha1"
    job = _replicated_job(request, options, run_dir, KINDS["trainjob"])
    job["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    container = job["template"]["spec"]["template"]["spec"]["containers"][0]
    runtime = {
        "mlPolicy": {"numNodes": request.nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [job]}},
    }
    train = {
        "runtimeRef": {"kind": "TrainingRuntime", "name": request.name},
        "trainer": {
            "numNodes": request.nodes,
            "image": container["image"],
            "command": container["command"],
            "resourcesPerNode": container["resources"],
        },
    }
    return [
        _object(version, "TrainingRuntime", request, options, runtime),
        _object(version, "TrainJob", request, options, train),
    ]


def _pytorchjob(request: JobRequest, options: PodOptions, run_dir: str) -> list[Manifest]:
    template = _pod_template(request, options, run_dir, KINDS["pytorchjob"], container="pytorch")
    # The operator sets the restart policy. `ExitCode` would take 75 for a permanent failure.
    del template["spec"]["restartPolicy"]
    replicas = {"Master": 1} | ({"Worker": request.nodes - 1} if request.nodes > 1 else {})
    spec = {
        "runPolicy": {
            "backoffLimit": _FAILURES_PER_POD * request.nodes,
            "cleanPodPolicy": "Running",
        },
        "pytorchReplicaSpecs": {
            name: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
            for name, count in replicas.items()
        },
    }
    return [_object("kubeflow.org/v1", "PyTorchJob", request, options, spec)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of Kubernetes job, such as JobSet: a function for its manifests, and names for its pods.

    Attributes:
        make: returns the manifests of a job.
        objects: resources that make up a job, as for `kubectl delete`; the job itself is the first.
        label: label of the job's pods, whose value is the job's name.
        first_pod: host name of pod 0, with `{}` for the job's name.
        index: environment variable with the number of a pod.
    """

    make: Callable[[JobRequest, PodOptions, str], list[Manifest]]
    objects: tuple[str, ...]
    label: str
    first_pod: str
    index: str = "JOB_COMPLETION_INDEX"


KINDS: Mapping[str, Kind] = {
    "job": Kind(
        make=_job,
        objects=("jobs.batch", "services"),
        label="batch.kubernetes.io/job-name",
        first_pod="{0}-0.{0}",
    ),
    "jobset": Kind(
        make=_jobset,
        objects=("jobsets.jobset.x-k8s.io",),
        label="jobset.sigs.k8s.io/jobset-name",
        first_pod="{0}-node-0-0.{0}",
    ),
    "trainjob": Kind(
        make=_trainjob,
        objects=("trainjobs.trainer.kubeflow.org", "trainingruntimes.trainer.kubeflow.org"),
        label="jobset.sigs.k8s.io/jobset-name",
        first_pod="{0}-node-0-0.{0}",
    ),
    "pytorchjob": Kind(
        make=_pytorchjob,
        objects=("pytorchjobs.kubeflow.org",),
        label="training.kubeflow.org/job-name",
        first_pod="{0}-master-0",
        index="PET_NODE_RANK",
    ),
}
