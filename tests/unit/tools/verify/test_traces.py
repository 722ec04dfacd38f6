"""Traces of several generations, read as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.tools.verify.comparison import compare, coverage, redone
from lockstep.tools.verify.traces import read

LOADER = {"kind": "loader", "loader": 0, "length": 8, "exhaustive": True}
LOOP = {"kind": "loop", "loader": 0, "epoch": 0, "round": 0, "complete": True}


def begin(step: int) -> dict[str, Any]:
    return {"kind": "begin", "step": step}


def seen(step: int, loss: str = "", replica: int = 0) -> dict[str, Any]:
    """A microbatch of two samples, in an epoch of four steps."""
    place = {"loader": 0, "epoch": 0, "round": 0, "batch": step - 1, "turn": 0}
    samples = [2 * step - 2, 2 * step - 1]
    more = {"replica": replica, "loss": loss or f"loss {step}", "value": 1.0, "samples": samples}
    return {"kind": "microbatch", "step": step, **place, **more}


def made(step: int, digest: str = "") -> dict[str, Any]:
    return {"kind": "step", "step": step, "digests": {"parameters": digest or f"digest {step}"}}


def write(directory: Path, name: str, *entries: dict[str, Any], end: str = "") -> None:
    directory.mkdir(exist_ok=True)
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (directory / name).write_text(lines + end)


def whole(directory: Path) -> Path:
    """A run without a fault."""
    steps = [entry for step in (1, 2, 3, 4) for entry in (seen(step), made(step))]
    write(directory, "rank-0.0.jsonl", begin(0), LOADER, *steps, LOOP)
    return directory


def test_a_later_generation_goes_on_where_an_earlier_one_stopped(tmp_path: Path) -> None:
    write(
        tmp_path / "a",
        "rank-0.0.jsonl",
        begin(0),
        LOADER,
        seen(1),
        made(1),
        seen(2),
        made(2),
        seen(3),
    )
    write(tmp_path / "a", "rank-0.1.jsonl", begin(1), LOADER, seen(2), made(2), seen(3), made(3))
    write(tmp_path / "a", "rank-0.2.jsonl", begin(3), LOADER, seen(4), made(4), LOOP)
    traces, undisturbed = read(tmp_path / "a"), read(whole(tmp_path / "b"))
    assert traces == undisturbed
    assert compare(traces, undisturbed, "a", "b") is None
    assert coverage(traces).is_exact
    assert coverage(traces).loops == 1


def test_more_than_nine_generations_are_in_order(tmp_path: Path) -> None:
    for number in range(11):
        digest = "last" if number == 10 else f"generation {number}"
        write(tmp_path, f"rank-0.{number}.jsonl", begin(0), made(1, digest))
    assert read(tmp_path).steps[1].digests == {0: {"parameters": "last"}}


def test_what_was_done_again_does_not_count_twice_nor_what_was_lost(tmp_path: Path) -> None:
    """Ranks of the first generation are gone in the second, and so is what they made."""
    for rank in range(2):
        entries = (begin(0), seen(1, replica=rank), made(1), seen(2, replica=rank), made(2))
        write(tmp_path, f"rank-{rank}.0.jsonl", *entries)
    write(tmp_path, "rank-0.1.jsonl", begin(1), seen(2), seen(2, replica=1), made(2))
    traces = read(tmp_path)
    assert {step: sorted(one.digests) for step, one in traces.steps.items()} == {1: [0, 1], 2: [0]}
    write(tmp_path, "rank-0.1.jsonl", begin(1))
    assert list(read(tmp_path).steps) == [1]


def test_a_step_that_comes_out_otherwise_when_done_again_is_found(tmp_path: Path) -> None:
    write(tmp_path, "rank-0.0.jsonl", begin(0), seen(1), made(1), seen(2), made(2), seen(3))
    write(tmp_path, "rank-0.1.jsonl", begin(1), seen(2), made(2), seen(3, "other"), made(3))
    difference = redone(read(tmp_path), "layout 2,kill@3")
    assert difference is not None
    assert (difference.step, difference.what) == (3, "redone")
    assert difference.text == (
        "step 3 was computed again after a crash on layout 2,kill@3 and differs: "
        "the loss of replica 0 was 1.0 (loss 3), then 1.0 (other)"
    )


def test_a_kill_between_two_backward_passes_of_a_microbatch(tmp_path: Path) -> None:
    both = [seen(3, "first"), seen(3, "second")]
    write(tmp_path, "rank-0.0.jsonl", begin(0), LOADER, seen(1), seen(2), both[0])
    write(tmp_path, "rank-0.1.jsonl", begin(2), *both, made(3))
    traces = read(tmp_path)
    assert redone(traces, "killed") is None
    assert coverage(traces, {(0, 0, 0)}).twice == ()
    # Each of the two counts.
    for number, losses in enumerate([("first", "x"), ("x", "second"), ("first",)]):
        other = [seen(1), seen(2), *(seen(3, loss) for loss in losses), made(3)]
        write(tmp_path / str(number), "rank-0.0.jsonl", begin(0), LOADER, *other)
        difference = compare(traces, read(tmp_path / str(number)), "killed", "other")
        assert difference is not None
        assert difference.step == 3
        assert "loss is" in difference.text or "no backward pass 2 on other" in difference.text
    write(tmp_path, "rank-0.1.jsonl", begin(2), seen(3, "x"), both[1], made(3))
    assert redone(read(tmp_path), "killed") is not None


def test_parameters_and_samples_count_too_and_over_several_generations(tmp_path: Path) -> None:
    write(tmp_path, "rank-0.0.jsonl", begin(0), made(1), made(2, "one"))
    write(tmp_path, "rank-0.1.jsonl", begin(0), made(1))
    write(tmp_path, "rank-0.2.jsonl", begin(0), made(1), made(2, "other"))
    assert [text for _, text in read(tmp_path).redone] == [
        "the parameters after it: one, then other"
    ]
    write(tmp_path, "rank-0.1.jsonl", begin(1), {**seen(2), "samples": [7, 8]})
    write(tmp_path, "rank-0.0.jsonl", begin(0), made(1), seen(2))
    assert [text for _, text in read(tmp_path).redone] == [
        "replica 0 saw samples [2, 3], then [7, 8]"
    ]


def test_half_lines_and_generations_that_wrote_nothing(tmp_path: Path) -> None:
    whole(tmp_path)
    expected = read(tmp_path)
    for rank, text in enumerate(["", '{"kind": "beg']):
        write(tmp_path, f"rank-{rank}.1.jsonl", end=text)
    assert read(tmp_path) == expected
    # What one rank could not write any more, another one may have.
    write(tmp_path, "rank-1.1.jsonl", begin(3), end='{"kind": "step", "step": 4, "dig')
    assert list(read(tmp_path).steps) == [1, 2, 3]


def test_a_loop_counts_as_a_whole_where_another_layout_says_so(tmp_path: Path) -> None:
    write(tmp_path, "rank-0.0.jsonl", begin(0), LOADER, seen(1), made(1))
    traces = read(tmp_path)
    assert coverage(traces).loops == 0
    assert len(coverage(traces, {(0, 0, 0)}).never) == 6


def test_an_evaluation_that_is_not_done_again_after_a_crash_still_counts(tmp_path: Path) -> None:
    place = {"loader": 1, "epoch": 0, "round": 0, "turn": 0, "replica": 0}
    evaluated = [
        {"kind": "seen", "step": 4, **place, "batch": batch, "samples": [batch]} for batch in (0, 1)
    ]
    loader, loop = {**LOADER, "loader": 1, "length": 2}, {**LOOP, "loader": 1}
    write(whole(tmp_path), "rank-0.1.jsonl", begin(4), loader, *evaluated, loop)
    write(
        tmp_path, "rank-0.2.jsonl", begin(4), loader, {"kind": "end", "digests": {"state of a": ""}}
    )
    traces = read(tmp_path)
    assert (coverage(traces).loops, coverage(traces).is_exact) == (2, True)
    assert traces.ends == {0: {"state of a": ""}}
