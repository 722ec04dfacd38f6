"""`lockstep run` and what cannot work: one clear error, an exit code, no process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.forked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "0"], "-n is 0; expected at least 1 rank"),
        (["-n", "-2"], "-n is -2; expected at least 1 rank"),
        (["-n", "two"], "-n is 'two'; expected a number of ranks"),
        (["-n", "100000"], "100000 ranks, but this process may use"),
        (["-n", "3", "--replicas", "2"], "3 ranks for 2 replica(s)"),
        (["--replicas", "0"], "--replicas is 0; expected at least 1"),
        (["--threads", "0"], "--threads is 0; expected at least 1"),
        (["--devices", "tpu"], "--devices is 'tpu'; expected auto, cpu, gpu, or a list"),
        (["--devices", "0,,1"], "--devices is '0,,1'; '' is no id; expected auto"),
        (["--devices", "0-3"], "--devices is '0-3'; expected auto"),
        (["-n", "cpu", "--devices", "0,1"], "-n cpu and --devices 0,1 contradict each other"),
        (
            [
                "--nnodes",
                "1:2",
                "--rdzv-endpoint",
                "127.0.0.1",
                "-n",
                "2",
                "--mesh",
                "2x2",
                "--strategy",
                "pipeline",
            ],
            "a mesh of 2x2 has 4 ranks; the run has 2",
        ),
        (
            ["--run-dir", "s3://bucket/a"],
            "--run-dir is the URL s3://bucket/a; expected a directory of",
        ),
        (["--bind", "tight"], "invalid choice: 'tight'"),
        (["--max-restarts", "-1"], "--max-restarts is -1; expected at least 0"),
        (["--preempt-signal", "KILL"], "--preempt-signal is 'KILL'; expected the name of a signal"),
    ],
)
def test_flags_that_cannot_work(lockstep, words, said):
    done = lockstep(
        "run",
        *words,
        "--devices=cpu" if "--devices" not in words else "--tee=3",
        lockstep.script(""),
    )
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (lockstep.directory / "runs").exists()


def test_missing_script(lockstep):
    done = lockstep("run", "nowhere.py")
    assert done.code == 2
    assert done.err == (
        "lockstep: error: the script nowhere.py does not exist; expected a Python file\n"
        "hint: -m runs a module by its name\n"
    )


def test_replicas_of_the_environment_count(lockstep):
    done = lockstep("run", "-n", "3", lockstep.script(""), env={"LOCKSTEP_REPLICAS": "2"})
    assert (done.code, "3 ranks for 2 replica(s)" in done.err) == (2, True)


def test_dry_run_prints_the_plan_and_starts_nothing(lockstep):
    script = lockstep.script("open('ran', 'w')")
    done = lockstep("run", "-n", "2", "--devices", "cpu", "--dry-run", script, "--lr", "0.1")
    assert done.code == 0
    for line in (
        "2 rank(s), started by fork",
        "  WORLD_SIZE=2",
        "  MASTER_PORT='(a free port)'",
        "rank 1 on cpu",
        "  RANK=1",
        "  LOCKSTEP_DEVICES=cpu",
    ):
        assert line in done.out.splitlines()
    assert "train.py --lr 0.1" in done.out
    assert [path.name for path in lockstep.directory.iterdir()] == ["train.py"]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory that nobody can write, root included."""
    path = tmp_path / "read-only"
    path.mkdir()
    if os.geteuid() != 0:
        path.chmod(0o500)
        yield path
        path.chmod(0o700)
        return
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "ro", "none", path], check=False).returncode
    ):
        pytest.skip("root ignores permissions, and mounting a read-only tmpfs is not allowed here")
    yield path
    subprocess.run([shutil.which("umount") or "umount", path], check=True)


def test_read_only_run_directory(lockstep, read_only):
    done = lockstep("run", "--run-dir", str(read_only / "run"), lockstep.script(""))
    assert done.code == 1
    assert f"lockstep: error: the run directory {read_only}/run cannot be used" in done.err
    assert "hint: --run-dir DIR" in done.err


def test_run_directory_behind_a_file(lockstep):
    lockstep.script("", "occupied")
    done = lockstep("run", "--run-dir", "occupied", lockstep.script(""))
    assert done.code == 2
    assert "the run directory occupied is a file, or is below one; expected a directory" in done.err


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of a few pages."""
    path = tmp_path / "tiny"
    path.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small tmpfs needs root and mount")
    if subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "none", path], check=False
    ).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield path
    subprocess.run([shutil.which("umount") or "umount", path], check=True)


@pytest.mark.ranks(2)
def test_full_disk_does_not_hang(lockstep, tiny_disk):
    script = lockstep.script("import os\nfor i in range(20000): print(i)\n")
    done = lockstep("run", "-n", "2", "--run-dir", str(tiny_disk / "run"), script)
    # Rank 0 is shown by the launcher, which goes on without a log; rank 1 writes its log itself.
    assert done.out.endswith("19999\n")
    assert done.code == 1
    assert "lockstep: rank 1 of 2 failed" in done.err
    assert "No space left on device" in done.err


def test_help_and_version_do_not_import_torch(lockstep):
    for words in (["--help"], ["run", "--help"], ["--version"], ["completion", "bash"]):
        code = (
            "import sys\nfrom lockstep.cli import main\n"
            f"try: main({words!r})\nexcept SystemExit as leave: assert not leave.code\n"
            "assert 'torch' not in sys.modules\n"
        )
        done = lockstep.python("-c", code)
        assert done.code == 0, done.err
        assert done.out


def test_no_command_prints_the_help(lockstep):
    done = lockstep()
    assert (done.code, done.out, done.err) == (0, lockstep("--help").out, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu", "train.py"], "hint: did you mean run?"),
        (["verfy", "train.py"], "hint: did you mean verify?"),
        (["run"], "the following arguments are required: SCRIPT\n"),
        (["submit"], "the following arguments are required: SCRIPT\n"),
        (["run", "--ranks", "2", "train.py"], "hint: did you mean -n? Otherwise: "),
        (["run", "--num-processes=2", "train.py"], "hint: did you mean -n? Otherwise: "),
        (["submit", "--ranks", "2", "train.py"], "hint: did you mean -n?"),
        (["verify", "train.py", "--layuots", "1,2"], "hint: did you mean --layouts?"),
        (
            ["verify", "train.py", "--lr", "1", "--threads", "1"],
            "lockstep verify train.py -- --lr 1",
        ),
        (["verify", "train.py", "--lr", "1", "--", "2"], "lockstep verify train.py -- --lr 1"),
        (
            ["verify", "--layouts", "1", "2,kil@3", "train.py"],
            "'kil@3' in the layouts '2,kil@3' is no",
        ),
        (["verify", "--layouts", "1", "kil@3", "train.py"], "hint: did you mean kill?"),
        (["verify", "--layouts", "1,2,kill@x", "train.py"], "expected kill@STEP or term@STEP"),
    ],
)
def test_near_misses_are_named(lockstep, words, said):
    lockstep.script("")
    done = lockstep(*words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


@pytest.mark.parametrize("dashes", [(), ("--",)])
@pytest.mark.parametrize(
    "verb", ["run", "verify --layouts 1,1 --keep-runs kept", "bench --ranks 1"]
)
def test_arguments_of_the_script_come_last_with_or_without_dashes(lockstep, verb, dashes):
    lockstep.script("import sys; print(sys.argv[1:])\nopen('seen', 'a').write(repr(sys.argv[1:]))")
    done = lockstep(*verb.split(), "train.py", *dashes, "--lr", "0.1", "a")
    assert set(re.findall(r"\[.*?\]", (lockstep.directory / "seen").read_text())) == {
        "['--lr', '0.1', 'a']"
    }, done


@pytest.mark.parametrize(
    ("name", "hint"),
    [("LOCKSTEP_REPLICA", "; did you mean LOCKSTEP_REPLICAS?"), ("LOCKSTEP_FOO", "")],
)
@pytest.mark.ranks(2)
def test_a_variable_that_nothing_reads_is_named_once(lockstep, name, hint):
    lockstep.script("import lockstep\nwith lockstep.Run('x', progress=False): pass")
    line = f"lockstep: warning: {name} is set, and Lockstep has no variable of this name{hint}\n"
    for done in (
        lockstep("run", "-n", "2", "train.py", env={name: "3"}),
        lockstep.python("train.py", env={name: "3"}),
    ):
        assert (done.code, done.err.count("has no variable"), line in done.err) == (0, 1, True), (
            done
        )


@pytest.mark.ranks(2)
def test_an_error_of_lockstep_is_on_the_terminal_once(lockstep):
    lockstep.script("import lockstep\nwith lockstep.Run('x') as run: run.loader([1, 2])")
    done = lockstep("run", "-n", "2", "train.py")
    said = "batch_size is missing; expected the samples of a global batch"
    assert (done.code, done.err.count(said)) == (1, 1), done
    (log,) = lockstep.directory.glob("runs/train/*/logs/rank-0.log")
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_help_states_the_conditions_of_the_promise(lockstep, verb):
    text = " ".join(lockstep(verb, "--help").out.split())
    for word in (
        "--replicas",
        "--threads",
        "1 to R ranks",
        "one kind of hardware",
        "one version of",
    ):
        assert word in text.partition("Exit codes")[2]


def test_a_doctor_of_a_url_has_no_file_system_to_look_at(lockstep):
    done = lockstep("doctor", "--run-dir", "gs://bucket/runs")
    assert done.code == 2
    assert "--run-dir is the URL gs://bucket/runs; expected a directory of this machine" in done.err
    assert "hint: copy checkpoints from there to the store" in done.err
