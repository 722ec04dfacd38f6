"""What old scripts expect, read from their source; and the port that is kept for a lone rank."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target.old_scripts import adapt, kept_port, warning


@pytest.fixture
def option(tmp_path: Path):
    """Return the option that a script of the given source is found to take."""

    def find(source: str | bytes, *args: str) -> str:
        script = tmp_path / "train.py"
        script.write_bytes(source if isinstance(source, bytes) else source.encode())
        return adapt(LaunchSpec(target=str(script), args=args))[0].local_rank_option

    return find


@pytest.mark.parametrize(
    "declaration",
    [
        "parser.add_argument('{}', type=int, default=-1)",
        "argparse.ArgumentParser().add_argument_group('old').add_argument('{}', type=int)",
        "def get(p):\n  if True:\n    p.add_argument('{}', type=int, default=0)",
        "parser.add_argument(f'--{{x}}'); parser.add_argument('{}')",
    ],
)
@pytest.mark.parametrize("spelling", ["--local_rank", "--local-rank"])
def test_an_option_that_the_script_declares(option, declaration, spelling):
    assert option(declaration.format(spelling)) == spelling


def test_of_both_spellings_one_is_enough(option):
    both = "parser.add_argument('--local-rank', '--local_rank', type=int)"
    assert option(both) in ("--local-rank", "--local_rank")


@pytest.mark.parametrize(
    "source",
    [
        "# parser.add_argument('--local_rank')",
        "parser.add_argument('--rank', dest='--local_rank', help='--local_rank')",
        "subprocess.run([sys.executable, 'x.py', '--local_rank', '0'])",
        "words.append('--local_rank')",
        "this is no Python",
        b"# coding: nonsense\nparser.add_argument('--local_rank')",
        b"\0",
        "x = " + "-" * 100_000 + "1\nparser.add_argument('--local_rank')",
    ],
)
def test_no_option(option, source):
    assert option(source) == "none"


def test_a_source_in_another_encoding(option):
    source = "# coding: latin-1\n# \xe9\nparser.add_argument('--local_rank')"
    assert option(source.encode("latin-1")) == "--local_rank"


@pytest.mark.parametrize("args", [("--local_rank", "0"), ("--lr", "1", "--local-rank=3")])
def test_a_user_who_gives_it_has_the_say(option, args):
    assert option("parser.add_argument('--local_rank')", *args) == "none"


@pytest.mark.parametrize("asked", ["none", "--local-rank"])
def test_flags_win_over_the_source(tmp_path, asked):
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--local_rank')")
    spec = LaunchSpec(target=str(script), local_rank_option=asked)
    assert adapt(spec) == (spec, None)


@pytest.mark.parametrize(
    "call",
    [
        "mp.spawn(main, args=(2,), nprocs=2)",
        "torch.multiprocessing.spawn(main, (2,), 2)",
        "spawn(main, nprocs=torch.cuda.device_count(), join=True)",
    ],
)
def test_a_script_that_starts_its_own_ranks(tmp_path, call):
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{call}\n")
    said = warning(LaunchSpec(target=str(script)))
    assert said is not None
    assert said.startswith("lockstep: train.py starts ranks of its own (line 2), and so may each")


@pytest.mark.parametrize(
    "call", ["pexpect.spawn('ls')", "mp.Process(target=main)", "# mp.spawn(main, nprocs=2)"]
)
def test_a_script_that_starts_something_else(tmp_path, call):
    script = tmp_path / "train.py"
    script.write_text(call)
    assert warning(LaunchSpec(target=str(script))) is None


def test_a_script_that_cannot_be_read(tmp_path):
    for target in (tmp_path / "nowhere.py", tmp_path):
        assert adapt(LaunchSpec(target=str(target)))[0].local_rank_option == "none"


DECLARATION = "raise SystemExit('imported')\nparser.add_argument('--local_rank')\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with packages that must not be imported."""
    for file in (
        "single.py",
        "package/__init__.py",
        "package/train.py",
        "package/__main__.py",
        "package/deep/__init__.py",
        "package/deep/train.py",
        "bare/inner/train.py",
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('imported')" if "__init__" in file else DECLARATION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["single", "package", "package.train", "package.deep.train", "bare.inner.train"]
)
def test_modules_are_found_without_being_imported(packages, name):
    before = set(sys.modules)
    spec, note = adapt(LaunchSpec(target=name, kind="module"))
    assert spec.local_rank_option == "--local_rank"
    assert note == f"lockstep: {name} takes --local_rank: each rank gets its own"
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "name", ["nowhere", "package.nowhere", "package.train.deeper", "sys", "a..b", "bare"]
)
def test_modules_without_a_source(packages, name):
    assert adapt(LaunchSpec(target=name, kind="module"))[0].local_rank_option == "none"


def test_functions_take_no_options():
    spec = LaunchSpec(target="main", kind="function", n=2)
    assert adapt(spec) == (replace(spec, local_rank_option="none"), None)
    assert warning(spec) is None


def test_a_kept_port_is_free_for_those_who_name_it():
    with kept_port() as port, kept_port() as other:
        assert port != other
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0, "nobody listens there"
        for address in ("127.0.0.1", ""):
            with socket.create_server((address, port)) as server:
                assert server.getsockname()[1] == port
        with socket.socket() as strict, pytest.raises(OSError, match="in use"):
            strict.bind(("127.0.0.1", port))
    with socket.socket() as strict:
        strict.bind(("127.0.0.1", port))
