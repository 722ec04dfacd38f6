"""Where output goes, with threads and pipes but no workers."""

from __future__ import annotations

import os

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.launch import output as module
from lockstep.launch.output import Output, say
from lockstep.launch.streams import Streams


@pytest.fixture
def show(tmp_path, capfd):
    """Write to ranks' streams; return what the terminal and the logs received."""

    def run(
        shown: Streams, pieces: list[tuple[int, int, bytes]], ranks: int = 2
    ) -> tuple[str, str, list[bytes]]:
        output = Output()
        logs = [tmp_path / f"rank-{rank}.log" for rank in range(ranks)]
        streams = [
            output.open(logs[rank], shown.prefixes(rank, rank, f"rank {rank}"))
            for rank in range(ranks)
        ]
        for rank, stream, data in pieces:
            os.write(streams[rank][stream], data)
        for descriptor in [one for pair in streams for one in pair]:
            os.close(descriptor)
        output.close()
        out, err = capfd.readouterr()
        return out, err, [log.read_bytes() for log in logs]

    return run


@pytest.fixture(autouse=True)
def own_streams(monkeypatch):
    """Let the output believe that pytest has not replaced the standard streams."""
    import sys

    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)


def test_only_the_main_rank_is_shown(show):
    out, err, logs = show(
        Streams(), [(0, 0, b"a\n"), (1, 0, b"b\n"), (0, 1, b"c\n"), (1, 1, b"d\n")]
    )
    assert (out, err) == ("a\n", "c\n")
    assert sorted(logs[0].split()) == [b"a", b"c"]
    assert logs[1] == b"b\nd\n"


def test_tee_prefixes_whole_lines(show):
    pieces = [(0, 0, b"be"), (1, 0, b"other\n"), (0, 0, b"gin\nlast"), (1, 1, b"\n")]
    out, err, logs = show(Streams(tee=3), pieces)
    assert sorted(out.splitlines()) == ["[rank 0] begin", "[rank 0] last", "[rank 1] other"]
    assert err == "[rank 1] \n"
    assert logs[0] == b"begin\nlast"


def test_output_of_a_process_that_outlives_its_rank_does_not_hold_the_end(tmp_path, capfd):
    output = Output()
    out, err = output.open(tmp_path / "log", ("", ""))
    os.write(out, b"kept\n")
    output.close()  # with `out` still open
    os.close(out)
    os.close(err)
    assert capfd.readouterr().out == "kept\n"


def test_a_log_that_cannot_be_written_is_an_error(tmp_path):
    output = Output()
    with pytest.raises(RunDirectoryError, match="cannot be written: No such file"):
        output.open(tmp_path / "missing" / "log", (None, None))
    output.close()


def test_each_stream_goes_where_it_is_asked_to_go(show):
    pieces = [(rank, k, f"{rank}{'oe'[k]}\n".encode()) for rank in (0, 1, 2) for k in (0, 1)]
    shown = Streams(redirects={0: 1}, tee={1: 2, 2: 3}, only=frozenset({0, 1}))
    out, err, logs = show(shown, pieces, ranks=3)
    assert out == "1o\n"
    assert sorted(err.splitlines()) == ["0e", "[rank 1] 1e"]
    assert [sorted(log.split()) for log in logs] == [[b"0e", b"0o"], [b"1e", b"1o"], [b"2e", b"2o"]]


@pytest.mark.parametrize(
    ("shown", "before"),
    [
        (b"\repoch 1: 50%", b"\repoch 1: 50%\n"),
        (b"\repoch 1: 50%\r             \r", b"\repoch 1: 50%\r             \r"),
        (b"epoch 1\n", b"epoch 1\n"),
    ],
)
def test_a_verdict_stands_below_a_progress_bar(tmp_path, monkeypatch, shown, before):
    reader, writer = module._open_terminal(1)
    with os.fdopen(writer, "w") as terminal, (tmp_path / "log").open("wb") as log:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setattr("sys.__stderr__", terminal)
        source = module._Source(module._Sink(writer), module._Sink(log.fileno()), b"")
        source.feed(shown)
        say("lockstep: rank 1 was killed")
        say("lockstep: restart 1")
        told = b""
        while not told.endswith(b"restart 1\n"):
            told += os.read(reader, 1 << 10)
    os.close(reader)
    assert told == before + b"lockstep: rank 1 was killed\nlockstep: restart 1\n"
