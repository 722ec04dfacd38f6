"""`lockstep submit` where there is no Slurm: what it would submit, and what cannot work."""

from __future__ import annotations

import sys

import pytest


def test_dry_run_prints_the_job_script_and_leaves_nothing(lockstep):
    script = lockstep.script("")
    words = ["--nodes", "2", "-n", "4", "--cpus-per-task", "2", "-p", "gpu", "-A", "us", "-t", "30"]
    words += ["--save-before", "120"]
    done = lockstep("submit", "--dry-run", *words, "--sbatch=--qos=high", script, "--lr", "0.1")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in (
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        f"--chdir={lockstep.directory}",
        "--output=runs/train/TIME/slurm-%j.out",
        "--requeue",
        "--signal=USR1@120",
        "--partition=gpu",
        "--account=us",
        "--time=30",
        "--qos=high",
    ):
        assert f"#SBATCH {option}" in lines
    run_dir = lockstep.directory / "runs/train/TIME"
    own = f"--run-dir {run_dir} --preempt-signal USR1"
    expected = f"  {sys.executable} -m lockstep run -n 4 {own} train.py --lr 0.1"
    assert expected in lines
    assert [path.name for path in lockstep.directory.iterdir()] == ["train.py"]


def test_a_module_and_options_of_the_run(lockstep):
    options = ["--replicas", "8", "--threads", "2", "--devices", "cpu", "--job-name", "mine"]
    done = lockstep("submit", "--dry-run", *options, "-m", "package.train", "-m")
    assert done.code == 0, done.err
    assert "--output=runs/train/TIME/slurm-%j.out" in done.out
    assert "#SBATCH --job-name=mine\n" in done.out
    ours = "--replicas 8 --threads 2 --devices cpu -m package.train -m\n"
    assert ours in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes is 0; expected at least 1"),
        (["--nodes", "two"], "invalid int value: 'two'"),
        (["-n", "0"], "-n is 0; expected at least 1 rank"),
        (["-n", "some"], "-n is 'some'"),
        (["--replicas", "0"], "--replicas is 0"),
        (["--partition", ""], "--partition is empty; expected a name"),
        (["--gpus-per-node", "x"], "--gpus-per-node is 'x'"),
        (["--sbatch=--array=1-3"], "--sbatch=--array=1-3 cannot be combined"),
        (["--save-before", "300", "--time", "5"], "--save-before is 300 s with --time 5"),
        (["--sbatch=qos"], "--sbatch is 'qos'"),
    ],
)
def test_what_cannot_work(lockstep, words, said):
    done = lockstep("submit", "--dry-run", *words, lockstep.script(""))
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not done.out


def test_missing_script(lockstep):
    done = lockstep("submit", "--dry-run", "nowhere.py")
    assert done.code == 2
    assert "the script nowhere.py does not exist" in done.err


def test_no_slurm_here(lockstep):
    done = lockstep("submit", lockstep.script(""), env={"PATH": str(lockstep.directory)})
    assert done.code == 2
    assert done.err == (
        "lockstep: error: there is no sbatch on PATH; expected the commands of Slurm\n"
        "hint: use a machine from which the cluster takes jobs; --dry-run prints the job script\n"
    )
    assert [path.name for path in lockstep.directory.iterdir()] == ["train.py"]


def test_help_does_not_import_torch(lockstep):
    code = (
        "import sys\nfrom lockstep.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as leave: assert not leave.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    for words in (["submit", "--help"], ["submit", "--dry-run", lockstep.script("")]):
        done = lockstep.python("-c", code, *words)
        assert done.code == 0, done.err
        assert done.out
