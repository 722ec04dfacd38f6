"""`lockstep submit --kubernetes` with kubectl, before a made-up API server; and one that records."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main

NEEDED = ("--image", "i", "--memory", "8Gi", "--volume", "claim:/data", "--nodes", "2")
_VERBS = ["create", "delete", "get", "list"]


def resource(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": _VERBS}


class Api(ThreadingHTTPServer):
    """Serves the objects of one namespace, as far as `kubectl get`, `logs` and `delete` ask for them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Any] = {}  # by path
        self.asked: list[str] = []
        batch = {"groupVersion": "batch/v1", "version": "v1"}
        group = {"name": "batch", "versions": [batch], "preferredVersion": batch}
        core = [resource("pods", "Pod"), resource("services", "Service")]
        jobs = [resource("jobs", "Job")]
        self.served: dict[str, Any] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": core},
            "/apis/batch/v1": {
                "kind": "APIResourceList",
                "groupVersion": "batch/v1",
                "resources": jobs,
            },
        }

    def have(self, name: str, *, conditions: list[Any], pods: list[Any]) -> None:
        """Let a job with two pods exist."""
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": {"completions": 2},
            "status": {"conditions": conditions},
        }
        place = "/apis/batch/v1/namespaces/default/jobs"
        self.objects = {
            f"{place}/{name}": job,
            f"/api/v1/namespaces/default/services/{name}": {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name},
            },
            "/api/v1/namespaces/default/pods": {
                "apiVersion": "v1",
                "kind": "PodList",
                "items": pods,
            },
        } | {f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}": pod for pod in pods}


class _Handler(BaseHTTPRequestHandler):
    server: Api
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.endswith("/log"):
            return self._send(200, f"words of {path.split('/')[-2]}\n".encode(), "text/plain")
        return self._answer({**self.server.served, **self.server.objects}.get(path))

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(self.server.objects.pop(self.path.partition("?")[0], None))

    def _answer(self, found: Any) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
        status |= {"reason": "NotFound", "message": "it is not found"}
        answer = status if found is None else found
        self._send(404 if found is None else 200, json.dumps(answer).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """An API server that kubectl is configured for; skips where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        configure(tmp_path, monkeypatch, server.server_address[1])
        yield server
        server.shutdown()
        thread.join()


def configure(directory: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "users": users}
    file = directory / "config"
    file.write_text(json.dumps(config | {"clusters": [cluster], "contexts": [context]}))
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setenv("HOME", str(directory))  # kubectl has a cache there


def pod(name: str, phase: str, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "node"}]},
        "status": {"phase": phase, **status},
    }


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "node", "state": state}]}


def condition(kind: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": "True", **more}


NOT_THERE = 'exec: "lockstep": executable file not found in $PATH'


@pytest.mark.parametrize(
    ("conditions", "pods", "code", "said"),
    [
        ([], [], 0, "job t waits for its pods\n"),
        ([], [pod("t-0", "Running"), pod("t-1", "Running")], 0, "job t runs on 2 pods\n"),
        (
            [],
            [
                pod("t-0", "Running"),
                pod(
                    "t-1",
                    "Pending",
                    conditions=[
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": "0/3 nodes are available",
                        }
                    ],
                ),
            ],
            0,
            "job t runs on 1 of 2 pods; pod t-1: Unschedulable: 0/3 nodes are available\n",
        ),
        (
            [],
            [
                pod(
                    "t-0",
                    "Pending",
                    **container(waiting={"reason": "ErrImagePull", "message": "no"}),
                )
            ],
            0,
            "job t waits: pod t-0: ErrImagePull: no\nhint: does the image exist",
        ),
        (
            [condition("Failed", reason="PodFailurePolicy", message="Container failed")],
            [pod("t-0", "Failed", **container(terminated={"exitCode": 127, "reason": "Error"}))],
            1,
            (
                "failed: Container failed; pod t-0: exit code 127: the command was not found\n"
                "hint: the image has no `lockstep` on PATH"
            ),
        ),
        (
            [],
            [pod("t-0", "Failed", **container(terminated={"exitCode": 128, "message": NOT_THERE}))],
            0,
            f"waits: pod t-0: exit code 128: {NOT_THERE}\nhint: the image has no `lockstep` on PATH",
        ),
        (
            [],
            [
                pod(
                    "t-0",
                    "Failed",
                    **container(terminated={"exitCode": 137, "reason": "OOMKilled"}),
                )
            ],
            0,
            "used more memory than its limit (OOMKilled)\nhint: --memory SIZE asks for more",
        ),
        ([condition("Complete")], [pod("t-0", "Succeeded")], 0, "job t is done\n"),
        ([condition("Suspended")], [], 0, "job t is suspended: a queue such as Kueue lets it go"),
    ],
)
def test_the_state_of_a_job(api, capsys, conditions, pods, code, said):
    api.have("t", conditions=conditions, pods=pods)
    assert main(["submit", "--kubernetes", "job", "--status", "t"]) == code
    assert said in capsys.readouterr().err
    selector = "labelSelector=batch.kubernetes.io%2Fjob-name%3Dt"
    assert any(selector in asked for asked in api.asked)


def test_the_output_of_a_job_and_its_end(api, capfd):
    api.have("t", conditions=[], pods=[pod("t-0", "Running"), pod("t-1", "Running")])
    assert main(["submit", "--kubernetes", "job", "--logs", "t"]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["[pod/t-0/node] words of t-0", "[pod/t-1/node] words of t-1"]
    assert main(["submit", "--kubernetes", "job", "--cancel", "t"]) == 0
    assert 'job.batch "t" deleted, service "t" deleted' in capfd.readouterr().err
    assert main(["submit", "--kubernetes", "job", "--status", "t"]) == 1
    assert "Kubernetes knows no job t" in capfd.readouterr().err
    assert main(["submit", "--kubernetes", "job", "--cancel", "t"]) == 1
    assert "Kubernetes knows no job t" in capfd.readouterr().err


def test_a_cluster_that_cannot_be_reached(tmp_path, monkeypatch, capsys):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    configure(tmp_path, monkeypatch, 1)
    assert main(["submit", "--kubernetes", "job", *NEEDED, "--apply", "train.py"]) == 2
    told = capsys.readouterr().err
    assert "kubectl did not take the job: " in told
    assert "127.0.0.1:1" in told
    assert "hint: kubectl cluster-info shows if the cluster can be reached" in told
    assert "memcache.go" not in told
    assert main(["submit", "--kubernetes", "job", "--status", "t"]) == 1
    assert "Kubernetes does not answer: The connection to the server" in capsys.readouterr().err


def test_no_kubectl(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in ((*NEEDED, "--apply", "train.py"), ("--status", "t"), ("--logs", "t")):
        assert main(["submit", "--kubernetes", "job", *words]) == 2
        assert "there is no kubectl on PATH" in capsys.readouterr().err


def test_what_kubectl_is_called_with(tmp_path, monkeypatch, capsys):
    recorder = tmp_path / "kubectl"
    recorder.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\ncat "$3" >{tmp_path}/manifests\n'
        'echo "service/t created"; echo "job.batch/t created"\n'
    )
    recorder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = ["submit", "--kubernetes", "job", *NEEDED, "--job-name", "t", "--namespace", "ns"]
    assert main([*words, "train.py"]) == 0
    printed = capsys.readouterr().out
    assert main([*words, "--apply", "train.py"]) == 0
    assert capsys.readouterr().err == (
        "lockstep: service/t created, job.batch/t created\n"
        "lockstep: state: lockstep submit --kubernetes job --namespace ns --status t · "
        "output: lockstep submit --kubernetes job --namespace ns --logs t · "
        "cancel: lockstep submit --kubernetes job --namespace ns --cancel t\n"
    )
    assert (tmp_path / "manifests").read_text() == printed
    apply, flag, file, timeout = (tmp_path / "words").read_text().splitlines()
    assert (apply, flag, timeout) == ("apply", "--filename", "--request-timeout=20s")
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--status", "A"], "the job's name is 'A'; expected a-z"),
        (["--status", "t", "--cancel", "t"], "--status and --cancel contradict each other"),
        (["--status", "t", "train.py"], "--status and SCRIPT contradict each other"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_what_cannot_be_asked(capsys, words, said):
    assert main(["submit", "--kubernetes", "job", *words]) == 2
    assert said in capsys.readouterr().err
