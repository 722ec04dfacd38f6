"""A run in a TrainJob sends its progress to Kubeflow's server, by TLS and with the token of its pod."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as trainer
import pytest

from tests.conftest import Lockstep

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]

SCRIPT = """
import torch, torch.nn.functional as F, lockstep
from torch.utils.data import TensorDataset

with lockstep.Run("small", replicas=2, threads=1, progress=False) as run:
    model = run.model(torch.nn.Linear(4, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
    loader = run.loader(data, batch_size=8)
    for epoch in run.epochs(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
"""


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Authorization"], body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, file = tmp_path / "key", tmp_path / "ca"
    words = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", *words, *names, "-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return key, file


@pytest.fixture
def server(certificate: tuple[Path, Path]) -> Iterator[Any]:
    key, file = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    with HTTPServer(("127.0.0.1", 0), _Handler) as made:
        made.got = []  # type: ignore[attr-defined]
        made.socket = context.wrap_socket(made.socket, server_side=True)
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def variables(certificate: tuple[Path, Path], directory: Path, port: int) -> dict[str, str]:
    (directory / "token").write_text("secret\n")
    return {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{port}/status",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(certificate[1]),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(directory / "token"),
    }


def test_progress_of_a_run_on_two_ranks(
    lockstep: Lockstep, server: Any, certificate: tuple[Path, Path]
) -> None:
    env = variables(certificate, lockstep.directory, server.server_address[1])
    done = lockstep("run", "-n", "2", lockstep.script(SCRIPT), env=env)
    assert done.code == 0, done.err
    path, token, body = server.got[-1]
    assert (path, token) == ("/status", "Bearer secret")
    message = json.loads(body)
    read = trainer.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(message)
    assert read is not None
    assert read.trainer_status is not None
    assert read.trainer_status.progress_percentage == 100
    assert read.trainer_status.estimated_remaining_seconds == 0
    metrics = {one.name: float(one.value) for one in read.trainer_status.metrics or ()}
    assert metrics.keys() == {"loss", "step", "epoch"}
    assert (metrics["step"], metrics["epoch"]) == (12, 3)
    assert len(server.got) <= 3, "no more than one message in five seconds"


def test_a_server_that_is_gone_does_not_end_the_run(
    lockstep: Lockstep, certificate: tuple[Path, Path]
) -> None:
    env = variables(certificate, lockstep.directory, 1)
    done = lockstep("run", "-n", "2", lockstep.script(SCRIPT), env=env)
    assert done.code == 0, done.err
    assert done.err.count("warning: Kubeflow's progress server: ") == 1
    assert "Connection refused" in done.err
