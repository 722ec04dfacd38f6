"""A real Slurm cluster of two nodes on this machine, for as long as somebody holds its standard input open.

`python -m tests.slurm_cluster DIRECTORY` starts munged, slurmctld and two slurmd with a key, ports and
files of their own, writes `ready` when both nodes are idle, and takes everything down again when its
standard input ends: also when whoever started it was killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

NODES = ("n1", "n2")
CPUS = 8  # what each node says it has, so that jobs of a few ranks fit beside each other
_START_SECONDS = 30.0
#: Daemons are where only administrators look.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

_CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until its old credential has expired: two minutes by default.
AuthInfo=socket={directory}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=1,bf_interval=1
LaunchParameters=use_interactive_step
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=5 State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-2] MaxTime=5 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str | None:
    """Return what this machine lacks for a cluster, or `None`."""
    if os.geteuid() != 0:
        return "needs root: slurmd starts processes of other users"
    wanted = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
    lacking = [name for name in wanted if shutil.which(name, path=_PATH) is None]
    return f"needs Slurm and munge: {', '.join(lacking)} not installed" if lacking else None


def variables_of_slurm() -> list[str]:
    """Return the variables by which a process would take itself for a part of another job or cluster."""
    return [name for name in os.environ if name.startswith(("SLURM", "SBATCH_", "PMI_", "PMIX_"))]


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Run a cluster; give the variables with which commands find it.

    Raises:
        RuntimeError: if it does not come up.
    """
    # Not in pytest's own directory, which only its user can enter: munge wants a socket for everybody.
    directory = Path(tempfile.mkdtemp(prefix="lockstep-slurm-"))
    directory.chmod(0o755)
    guard = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm_cluster", str(directory)],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C on the tests is no reason to go before they are done
    )
    try:
        assert guard.stdout is not None
        if guard.stdout.readline() != "ready\n":
            raise RuntimeError(f"the cluster did not start:\n{guard.stdout.read()}")
        yield {"SLURM_CONF": str(_configuration(directory))}
    finally:
        guard.communicate(timeout=60)


def main() -> int:
    """Keep a cluster running until standard input ends."""
    directory = Path(sys.argv[1])
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _start(directory, daemons)
        print("ready", flush=True)  # noqa: T201 - whoever started this waits for the word
        sys.stdin.read()
    except RuntimeError as error:
        print(f"{error}\n{_logs(directory)}", flush=True)  # noqa: T201 - for the one who waits
        return 1
    finally:
        _stop(directory, daemons)
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _configuration(directory: Path) -> Path:
    return directory / "slurm.conf"


def _start(directory: Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(32))
    key.chmod(0o400)
    (directory / "state").mkdir()
    _configuration(directory).write_text(
        _CONFIGURATION.format(
            host=socket.gethostname(), ports=_free_ports(3), directory=directory, cpus=CPUS
        )
    )
    names = ("key-file", "socket", "pid-file", "seed-file")
    files = ("munge.key", "munge.sock", "munge.pid", "munge.seed")
    options = [f"--{name}={directory / file}" for name, file in zip(names, files, strict=True)]
    _launch(directory, daemons, "munged", "--foreground", "--num-threads=2", *options)
    _wait_until((directory / "munge.sock").exists)
    _launch(directory, daemons, "slurmctld", "-D", "-i")
    for node in NODES:
        _launch(directory, daemons, "slurmd", "-D", "-N", node)
    states = ("sinfo", "-h", "-p", "main", "-N", "-o", "%T")
    _wait_until(lambda: _ask(directory, *states).split() == ["idle"] * 2)


def _launch(directory: Path, daemons: list[subprocess.Popen[bytes]], *words: str) -> None:
    with (directory / "daemons.log").open("ab") as log:
        daemons.append(_popen(directory, words, log))


def _popen(directory: Path, words: tuple[str, ...], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [shutil.which(words[0], path=_PATH) or words[0], *words[1:]],
        env=_environ(directory),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


def _stop(directory: Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    _ask(directory, "scancel", "--full", "--signal=KILL", "--user=root")
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(timeout=5)
        daemon.kill()
        daemon.wait()
    # Job steps and what they have started outlive slurmd: that is what lets it be restarted.
    for _ in range(3):
        for pid in _ours(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ours(directory: Path) -> list[int]:
    """Return the processes that know this cluster, by their variables."""
    mark = f"SLURM_CONF={_configuration(directory)}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def _environ(directory: Path) -> dict[str, str]:
    # A cluster started from a job of another one is not part of that job.
    foreign = variables_of_slurm()
    clean = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**clean, "PATH": _PATH, "SLURM_CONF": str(_configuration(directory))}


def _ask(directory: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            words, env=_environ(directory), capture_output=True, text=True, check=False, timeout=10
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in held]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not ready after {_START_SECONDS:g} s")
        time.sleep(0.05)


def _logs(directory: Path) -> str:
    texts = (f"--- {file.name}\n{file.read_text()[-2000:]}" for file in directory.glob("*.log"))
    return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
