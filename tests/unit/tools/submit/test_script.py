"""The text of a job script: what it says to Slurm, and that no name breaks it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.tools.submit.backends.slurm import BACKEND
from lockstep.tools.submit.request import JobRequest

HOME = Path("/home/ada/project")


def text(request: JobRequest, *, directory: Path = HOME, run_dir: Path = HOME / "runs/t/1") -> str:
    request = replace(request, directory=directory, python="/opt/venv/bin/python")
    return BACKEND.script(request, run_dir)


def test_the_whole_script():
    request = JobRequest(
        name="train",
        command=("train.py", "--lr", "0.1"),
        run_options=("--replicas", "16"),
        nodes=2,
        gpus_per_node="a100:4",
        cpus_per_rank=8,
        time_limit="2:00:00",
        options=("--partition=gpu", "--exclusive"),
    )
    assert text(request) == (
        "#!/bin/bash\n"
        "# Written by `lockstep submit`; `sbatch` takes it as it is, and as you change it.\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --cpus-per-task=32\n"
        "#SBATCH --gpus-per-node=a100:4\n"
        "#SBATCH --time=2:00:00\n"
        "#SBATCH --chdir=/home/ada/project\n"
        "#SBATCH --output=runs/t/1/slurm-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --requeue\n"
        "#SBATCH --signal=USR1@90\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --exclusive\n"
        "\n"
        "# One launcher on each node starts the ranks of that node.\n"
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32"
        " --kill-on-bad-exit=0 --wait=60 \\\n"
        "  /opt/venv/bin/python -m lockstep run -n gpu --run-dir /home/ada/project/runs/t/1"
        " --preempt-signal USR1 --replicas 16 train.py --lr 0.1\n"
        "code=$?\n"
        "\n"
        "# 75: preempted, its state is saved. 138: the signal came before there was any.\n"
        "# Requeue the job: the same run resumes. A job that Slurm is ending already is left alone.\n"
        "if [ $code -eq 75 ] || [ $code -eq 138 ]; then\n"
        '  if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then\n'
        '    scontrol requeue "$SLURM_JOB_ID"\n'
        "  fi\n"
        "fi\n"
        "exit $code\n"
    )


def test_as_many_ranks_as_cores():
    script = text(JobRequest(name="t", command=("t.py",), ranks="cpu", options=("--exclusive",)))
    assert "run -n cpu --run-dir" in script
    assert "cpus-per-task" not in script


def test_the_launchers_words_reach_it_unbroken(tmp_path):
    words = ("it's a.py", "$HOME", "`id`", "a\nb", "", 'say "x"', "\\", "é", "*", "# no comment")
    script = text(JobRequest(name="t", command=words, ranks=3), run_dir=HOME / "a b")
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    srun.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", script], env={"PATH": str(tmp_path)}, capture_output=True, check=True
    )
    seen = done.stdout.decode().split("\0")[:-1]
    launcher = seen[seen.index("/opt/venv/bin/python") :]
    assert launcher[1:6] == ["-m", "lockstep", "run", "-n", "3"]
    assert launcher[6:10] == ["--run-dir", "/home/ada/project/a b", "--preempt-signal", "USR1"]
    assert launcher[10:] == list(words)


@pytest.mark.parametrize("character", ["\n", "\r", "\x1b", "\u2028", "\0"])
@pytest.mark.parametrize("where", ["directory", "run_dir"])
def test_a_directory_cannot_write_lines_of_its_own(where, character):
    path = Path(f"/home/ada{character}#SBATCH --uid=0")
    with pytest.raises(UsageError, match="has a control character, and cannot stand in a job"):
        text(JobRequest(name="t", command=("a.py",)), **{where: path})


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [
        (75, "RUNNING", True),
        (138, "RUNNING", True),
        (75, "COMPLETING", False),
        (1, "RUNNING", False),
    ],
)
def test_what_is_put_back_into_the_queue(tmp_path, code, state, requeued):
    script = text(JobRequest(name="t", command=("t.py",)))
    programs = {
        "srun": f"exit {code}",
        "squeue": f'echo "$@" >> {tmp_path}/asked; echo {state}',
        "scontrol": f'echo "$@" > {tmp_path}/told',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "12"}
    done = subprocess.run(["/bin/bash", "-c", script], env=environ, check=False)
    assert done.returncode == code
    assert (tmp_path / "told").exists() is requeued
    if requeued:
        assert (tmp_path / "told").read_text() == "requeue 12\n"
        assert "--jobs=12" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "train"),
        ("a b", '"a b"'),
        ("it's", '"it\'s"'),
        ('"x" \\', '"\\"x\\" \\\\"'),
        ("#1", '"#1"'),
        ("$HOME", '"$HOME"'),  # sbatch expands nothing
    ],
)
def test_names_are_quoted_for_sbatch(name, said):
    assert f"#SBATCH --job-name={said}\n" in text(JobRequest(name=name, command=("t.py",)))
    assert f"#SBATCH --comment={said}\n" in text(
        JobRequest(name="t", command=("t.py",), options=(f"--comment={name}",))
    )


def test_percent_signs_are_no_symbols():
    asked = JobRequest(name="100%", command=("t.py",))
    script = text(asked, directory=Path("/a%b"), run_dir=Path("/a%b/c%d e"))
    assert "#SBATCH --job-name=100%\n" in script
    assert "#SBATCH --chdir=/a%b\n" in script
    assert '#SBATCH --output="c%%d e/slurm-%j.out"\n' in script
    outside = text(asked, directory=Path("/a%b"), run_dir=Path("/a%c"))
    assert "#SBATCH --output=/a%%c/slurm-%j.out\n" in outside


def test_a_backslash_in_the_way_is_refused():
    with pytest.raises(UsageError, match="has a backslash in it"):
        text(JobRequest(name="t", command=("t.py",)), run_dir=HOME / "a\\b")
