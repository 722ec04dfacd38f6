"""Pods on one machine, as Kubernetes would run a manifest: what replaces them is read from the manifest.

    with Cluster(hosts, manifests, directory) as cluster:   # starts the pods
        cluster.run(lambda: cluster.step() > 10)
        cluster.evict(1)
        assert cluster.run() == "Complete"

A pod is a network namespace with a name in DNS (/etc/hosts of all pods, while it runs), the number of the
pod in its environment, and a memory control group. Its launcher gets SIGTERM, and after the grace period of
the manifest SIGKILL. No container is made: the image is this machine's, volumes are directories of it, and
users, capabilities and the read-only root of a manifest have no effect.

Rules, each as Kubernetes 1.31, JobSet and the Training Operator document them: an Indexed Job replaces a
failed pod after a delay, which doubles with each; failures that `podFailurePolicy` ignores do not count to
`backoffLimit`; the pods that are left end with the job (`successPolicy`). A container of a PyTorchJob
starts again in its pod. `DELAY` is shorter than the 10 s of Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.hosts import Host, Hosts
from tests.namespaces import NAMES

#: Seconds until the first failed pod is replaced; Kubernetes waits for 10.
DELAY = 0.5
_MEMORY = Path("/sys/fs/cgroup/memory")
_BYTES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass
class Pod:
    """A pod: the namespace, and the launcher in it."""

    index: int
    host: Host
    process: subprocess.Popen[str]
    #: Whether the cluster, not the run, ends the pod: it then has the condition DisruptionTarget.
    disrupted: bool = False
    deleted: bool = False
    kill_at: float | None = None
    output: list[str] = field(default_factory=list)


class Cluster:
    """Runs the pods of one job until it ends.

    Args:
        manifests: what `lockstep submit --kubernetes` prints, parsed.
        directory: the volume; run directories and the script lie there.
        count: number of pods that have room at first; the others wait.
        apart: a directory that pods do not share with pod 0, as with a volume of each node.
    """

    def __init__(
        self,
        hosts: Hosts,
        manifests: list[dict[str, Any]],
        directory: Path,
        count: int | None = None,
        apart: Path | None = None,
    ) -> None:
        self._apart = apart
        self._hosts, self._directory = hosts, directory
        self._switch = hosts.switch()
        self._addresses = iter(range(1, 250))
        self.kind, self.name, self._spec, templates = _read(manifests)
        self._template, self._total = templates[0], len(templates)
        self._pod = self._template["spec"]
        self.parallelism = self._total if count is None else count
        self.pods: dict[int, Pod] = {}
        #: Exit codes and outputs of launchers that have ended, in order: index, exit code, errors.
        self.ended: list[tuple[int, int, str]] = []
        self.failures = 0  # that count to the limit
        self.replaced = 0
        self._due: dict[int, float] = {}  # when a pod is made, by index
        self._delay = DELAY
        self.condition = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in list(self.pods.values()):
            self.kill(pod.index)
            pod.process.communicate(timeout=10)

    @property
    def container(self) -> dict[str, Any]:
        """The container in the manifest, which a test may change before the pods are made."""
        found: dict[str, Any] = self._pod["containers"][0]
        return found

    # --- faults -------------------------------------------------------------------------------

    def kill(self, index: int) -> None:
        """Kill all processes of a pod at once, as the end of its memory or of its machine does."""
        inside = subprocess.run(
            ["ip", "netns", "pids", self.pods[index].host.namespace],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        )
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def evict(self, index: int) -> None:
        """End a pod, as a drained node does: DisruptionTarget, SIGTERM, and SIGKILL after the grace."""
        self.pods[index].disrupted = True
        self._end(index)

    def preempt(self) -> None:
        """Send SIGTERM to the containers of all pods, without a condition, as a shutdown may."""
        for index in list(self.pods):
            self._end(index)

    def resize(self, count: int) -> None:
        """Set `parallelism`: pods with higher numbers are deleted, or new ones are made."""
        self.parallelism = count
        for index in [index for index in self.pods if index >= count]:
            self.pods[index].deleted = True
            self._end(index)

    def _end(self, index: int) -> None:
        pod = self.pods[index]
        pod.process.send_signal(signal.SIGTERM)
        pod.kill_at = time.monotonic() + self._pod["terminationGracePeriodSeconds"]

    # --- the controller -----------------------------------------------------------------------

    def run(self, until: Callable[[], bool] = lambda: False, seconds: float = 90) -> str:
        """Act as the controller and the kubelets until the job ends, or something holds."""
        deadline = time.monotonic() + seconds
        while not (self.condition and not self.pods) and not until():
            assert time.monotonic() < deadline, (self.condition, self.ended, self._outputs())
            self._make_pods()
            for pod in list(self.pods.values()):
                self._look(pod)
            time.sleep(0.01)
        return self.condition

    def _outputs(self) -> list[str]:
        texts = []
        for pod in list(self.pods.values()):
            self.kill(pod.index)
            texts.append(" ".join(pod.process.communicate(timeout=10)))
        return texts

    def _make_pods(self) -> None:
        if self.condition:
            return
        for index in range(self.parallelism):
            if index not in self.pods and time.monotonic() >= self._due.get(index, 0.0):
                self.pods[index] = self._make(index)

    def _make(self, index: int) -> Pod:
        host = self._hosts.host(self._host_name(index))
        self._switch.plug(host, f"10.60.0.{next(self._addresses)}/24")
        pods = {**{other: pod.host for other, pod in self.pods.items()}, index: host}
        self._tell_names(pods)
        return Pod(index, host, self._start(index, host))

    def _start(self, index: int, host: Host) -> subprocess.Popen[str]:
        container = self.container
        given = {one["name"]: one["value"] for one in container["env"]}
        environ = given | self._environment(index) | {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        program, *words = (expand(word, environ) for word in container["command"])
        assert program == "lockstep"
        del environ["HOME"]  # a path of the container
        process = host.start(
            *(sys.executable, "-m", program, *words),
            env=environ | {"OMP_NUM_THREADS": "1"},
            cwd=self._directory,
            hidden=self._apart if index else None,
        )
        _limit(process.pid, host.namespace, container["resources"]["limits"]["memory"])
        return process

    def _look(self, pod: Pod) -> None:
        if pod.process.poll() is None:
            if pod.kill_at is not None and time.monotonic() > pod.kill_at:
                self.kill(pod.index)
            return
        out, err = pod.process.communicate(timeout=10)
        code = pod.process.returncode
        code = 128 - code if code < 0 else code
        self.ended.append((pod.index, code, out + err))
        if self.kind == "PyTorchJob" and code and not pod.disrupted and not self.condition:
            self._delayed(pod.index, time.monotonic())
            self._restart_container(pod)
            return
        del self.pods[pod.index]
        self._switch.unplug(pod.host)
        pod.host.close()
        self._tell_names({other.index: other.host for other in self.pods.values()})
        if code == 0:
            self._finish("Complete")
        elif not self.condition and not pod.deleted:
            self._judge(pod, code)

    def _restart_container(self, pod: Pod) -> None:
        self.failures += 1
        if self.failures > self._spec["runPolicy"]["backoffLimit"]:
            return self._finish("Failed")
        time.sleep(self._delay)
        pod.kill_at, pod.process = None, self._start(pod.index, pod.host)
        return None

    def _judge(self, pod: Pod, code: int) -> None:
        """Replace a pod that has failed, as the policies of the job want it."""
        action = "Ignore" if self.kind == "PyTorchJob" else self._action(pod, code)
        if action == "FailJob":
            return self._finish("Failed")
        self.failures += action == "Count"
        if self.kind != "PyTorchJob" and self.failures > self._spec["backoffLimit"]:
            return self._finish("Failed")
        self.replaced += 1
        self._delayed(pod.index, time.monotonic())
        return None

    def _delayed(self, index: int, now: float) -> None:
        self._due[index] = now + self._delay
        self._delay *= 2

    def _action(self, pod: Pod, code: int) -> str:
        for rule in self._spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes", {}).get("values", ())
            conditions = [one["type"] for one in rule.get("onPodConditions", ())]
            if code in codes or (pod.disrupted and "DisruptionTarget" in conditions):
                return str(rule["action"])
        return "Count"

    def _finish(self, condition: str) -> None:
        """Set the job's condition; the pods that are left get SIGTERM."""
        if self.condition:
            return
        if condition == "Complete" and self.kind != "PyTorchJob":
            assert self._spec["successPolicy"] == {"rules": [{"succeededCount": 1}]}
        self.condition = condition
        for index in list(self.pods):
            self._end(index)

    # --- names and variables ------------------------------------------------------------------

    def _host_name(self, index: int) -> str:
        if self.kind == "PyTorchJob":
            return f"{self.name}-master-0" if index == 0 else f"{self.name}-worker-{index - 1}"
        return f"{self.name}-{index}" if self.kind == "Job" else f"{self.name}-node-0-{index}"

    def _tell_names(self, pods: dict[int, Host]) -> None:
        """Write the names of running pods into the /etc/hosts of each."""
        lines = ["127.0.0.1 localhost"]
        subdomain = self._pod.get("subdomain", self.name)
        for host in pods.values():
            full = f"{host.name}.{subdomain}"
            lines.append(f"{host.address} {full}.default.svc.cluster.local {full} {host.name}")
        for host in pods.values():
            (NAMES / host.namespace / "hosts").write_text("\n".join(lines) + "\n")

    def _environment(self, index: int) -> dict[str, str]:
        if self.kind == "PyTorchJob":
            count = str(self._total)
            own = {"RANK": str(index), "WORLD_SIZE": count, "MASTER_ADDR": f"{self.name}-master-0"}
            pet = {"PET_NNODES": count, "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "1"}
            return own | pet | {"MASTER_PORT": "23456"}
        own = {"JOB_COMPLETION_INDEX": str(index)}
        if self.kind != "TrainJob":
            return own
        return own | {
            "PET_NNODES": str(self._total),
            "PET_NODE_RANK": str(index),
            "PET_NPROC_PER_NODE": "auto",
            "PET_MASTER_ADDR": f"{self.name}-node-0-0.{self.name}",
            "PET_MASTER_PORT": "29400",
        }


def expand(word: str, environ: dict[str, str]) -> str:
    """Expand `$(NAME)` and `$$` in a word of a command, as Kubernetes does."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return environ.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)", value, word)


def _read(
    manifests: list[dict[str, Any]],
) -> tuple[str, str, dict[str, Any], list[dict[str, Any]]]:
    """Return kind, name and spec of a job, and the template of each of its pods."""
    job = manifests[-1]
    kind, name, spec = job["kind"], job["metadata"]["name"], job["spec"]
    if kind == "PyTorchJob":
        replicas = spec["pytorchReplicaSpecs"].values()
        assert {one["restartPolicy"] for one in replicas} == {"OnFailure"}
        return (
            kind,
            name,
            spec,
            [one["template"] for one in replicas for _ in range(one["replicas"])],
        )
    if kind == "TrainJob":
        spec = manifests[0]["spec"]["template"]["spec"]
    if kind in ("JobSet", "TrainJob"):
        (replicated,) = spec["replicatedJobs"]
        spec = replicated["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    return kind, name, spec, [spec["template"]] * spec["completions"]


def _limit(pid: int, name: str, memory: str) -> None:
    """Put a process into a memory control group of its own, where this machine has them."""
    group = _MEMORY / name
    with contextlib.suppress(OSError):
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(int(memory[:-2]) * _BYTES[memory[-2:]]))
        (group / "cgroup.procs").write_text(str(pid))
