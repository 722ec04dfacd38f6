"""`TrainJobStatus`: sends step, epoch, time left and logged values of a run to Kubeflow Trainer.

Trainer (2.2 and later, with the feature gate `TrainJobStatus`) sets three variables in the pods of a
TrainJob: URL, certificate and token of its progress server. It shows the newest message to this server as
`status.trainerStatus` of the TrainJob.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.state.record.loggers import Backend, Say
from lockstep.state.record.reading import LineReader

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
#: Variables with the paths of the server's certificate and of a token, which changes from time to time.
_CERTIFICATE, _TOKEN = "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"
#: Seconds between two messages, of which Kubeflow asks for no more, and seconds for one of them.
_EVERY, _TIMEOUT = 5.0, 5.0


def has_server(environ: Mapping[str, str]) -> bool:
    """Return whether `environ` has all three variables of the progress server of Kubeflow Trainer.

    They are the server's URL, its certificate and a token; Trainer sets them in the pods of a TrainJob.
    """
    return {_URL, _CERTIFICATE, _TOKEN} <= environ.keys()


class TrainJobStatus(Backend):
    """Logger that sends logged values and progress to Kubeflow, at most every five seconds.

    Args:
        events: events file of the main rank; its newest event `pace` has the run's progress.
        say: function that shows a warning to the user.
    """

    def __init__(self, events: Path, say: Say) -> None:
        self._events, self._say = LineReader(events), say
        self._pace: Mapping[str, Any] = {}
        self._values: dict[str, float] = {}
        self._next = 0.0
        self._has_warned = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep the logged `values` and the number `step` of their step for the next message."""
        self._values |= {**values, "step": step}

    def flush(self) -> None:
        """Send the newest values and the progress, unless this was done in the last five seconds."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._send({})

    def close(self, *, failed: bool) -> None:
        """Send the newest values and the progress; send 100 % if the run has not failed."""
        self._send({} if failed else {"progressPercentage": 100, "estimatedRemainingSeconds": 0})

    def _send(self, known: Mapping[str, int]) -> None:
        for event in self._events.events():
            if event["kind"] == "pace":
                self._pace = event
        if "epoch" in self._pace:
            self._values["epoch"] = self._pace["epoch"] + 1
        metrics = [{"name": name, "value": f"{value:.6g}"} for name, value in self._values.items()]
        now = datetime.now(UTC).isoformat()
        status = {**_progress(self._pace), **known, "metrics": metrics, "lastUpdatedTime": now}
        try:
            _post(json.dumps({"trainerStatus": status}).encode())
        except OSError as error:  # the next message has newer values
            if not self._has_warned:
                self._say(f"lockstep: warning: Kubeflow's progress server: {error}; trying again")
            self._has_warned = True


def _progress(pace: Mapping[str, Any]) -> dict[str, int]:
    """Return the percentage done and the seconds left of a run, as fields of Kubeflow's TrainJob status.

    `pace`: fields of the run's newest event of kind `pace`, with epoch, batch and the median time of a
    step. The result is empty if the number of epochs, or of batches in an epoch, is unknown.
    """
    epochs, batches = pace.get("epochs"), pace.get("batches")
    if not epochs or not batches:
        return {}
    done = min((pace["epoch"] + pace.get("batch", 0) / batches) / epochs, 1.0)
    left = (1 - done) * epochs * batches * pace["median"]
    return {"progressPercentage": int(100 * done), "estimatedRemainingSeconds": round(left)}


def _post(body: bytes) -> None:
    token = Path(os.environ[_TOKEN]).read_text().strip()
    context = ssl.create_default_context(cafile=os.environ[_CERTIFICATE])
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    url = os.environ[_URL]
    if not url.startswith("https://"):  # the token would be readable on its way
        raise OSError(f"{_URL} is {url!r}; expected https://")
    asked = urllib.request.Request(url, data=body, headers=headers, method="POST")  # noqa: S310 - https
    urllib.request.urlopen(asked, timeout=_TIMEOUT, context=context).close()  # noqa: S310 - https
