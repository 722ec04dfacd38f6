from lockstep.tools.verify.comparison import compare, coverage
from lockstep.tools.verify.traces import Step, TracedMicrobatch, Traces


def traces(losses: dict[int, str], *, samples: tuple[int, ...] = (0, 1)) -> Traces:
    found = Traces(lengths={0: 2}, complete={(0, 0, 0)})
    for step, bits in losses.items():
        key = (step, 0, 0, 0, step - 1, 0, 0, 0)
        found.steps[step] = Step(
            {key: TracedMicrobatch(bits, 1.0, samples)}, {0: {"parameters": f"digest {bits}"}}
        )
    return found


def test_equal_traces() -> None:
    assert compare(traces({1: "a", 2: "b"}), traces({1: "a", 2: "b"}), "1", "2") is None


def test_the_first_step_that_differs_is_named() -> None:
    difference = compare(
        traces({1: "a", 2: "b", 3: "c"}), traces({1: "a", 2: "x", 3: "y"}), "1", "2"
    )
    assert difference is not None
    assert (difference.step, difference.what) == (2, "loss")


def test_samples_come_before_losses() -> None:
    difference = compare(traces({1: "a"}), traces({1: "b"}, samples=(1, 0)), "1", "2")
    assert difference is not None
    assert difference.what == "samples"


def test_parameters_come_last() -> None:
    other = traces({1: "a"})
    other.steps[1].digests[0] = {"parameters": "another"}
    difference = compare(traces({1: "a"}), other, "1 rank", "2 ranks")
    assert difference is not None
    assert difference.what == "parameters"


def test_a_layout_with_fewer_steps() -> None:
    difference = compare(traces({1: "a", 2: "b"}), traces({1: "a"}), "1 rank", "2 ranks")
    assert difference is not None
    assert difference.text == "step 2 happens on 1 rank, not on 2 ranks"


def test_the_object_that_differs_is_named() -> None:
    one, other = traces({1: "a"}), traces({1: "a"})
    for found, digest in ((one, "one"), (other, "other")):
        found.steps[1].digests[0] = {"parameters of model 0": "same", "state of ema": digest}
    difference = compare(one, other, "1 rank", "2 ranks")
    assert difference is not None
    assert (difference.what, difference.text) == (
        "state",
        "step 1: equal samples and losses, but the state of ema is one on 1 rank, other on 2 ranks",
    )
    for digests in ({"state of ema": "third"}, {}):  # a rank may lack a variable of run.state
        theirs = {"parameters of model 0": "same", **digests}
        other.steps[1].digests = {0: one.steps[1].digests[0], 1: theirs}
        difference = compare(one, other, "1 rank", "2 ranks")
        assert difference is not None
        assert difference.text == "step 1: the ranks of 2 ranks hold different state of ema"


def test_what_changes_after_the_last_step_is_found() -> None:
    one, other = traces({1: "a"}), traces({1: "a"})
    one.ends, other.ends = {0: {"parameters": "x"}}, {0: {"parameters": "y"}}
    difference = compare(one, other, "1 rank", "2 ranks")
    assert difference is not None
    assert difference.text.startswith(
        "the end of the run: equal steps, but the parameters are x on"
    )
    other.ends = {}  # it did not come to its end
    assert compare(one, other, "1 rank", "2 ranks") is None


def test_evaluations_are_counted_and_compared() -> None:
    one, other = traces({1: "a"}), traces({1: "a"})
    for found, samples in ((one, (0, 1, 2)), (other, (2, 1, 1))):
        found.lengths[1] = 3
        found.complete.add((1, 0, 0))
        found.evaluated[1, 0, 0, 0, 0, 0] = 1, samples
    assert (coverage(one).loops, coverage(one).is_exact) == (2, True)
    assert (coverage(other).twice, coverage(other).never) == (((1, 0, 1),), ((1, 0, 0),))
    difference = compare(one, other, "1 rank", "2 ranks")
    assert difference is not None
    assert difference.what == "samples"
    assert (
        "after step 1 (loader 1, epoch 0, batch 0), replica 0: samples [0, 1, 2]" in difference.text
    )


def test_batches_that_a_script_passes_over_are_seen() -> None:
    found = traces({1: "a"})
    found.lengths[0] = 4
    found.evaluated[0, 0, 0, 1, 0, 0] = 1, (2, 3)
    assert coverage(found).is_exact


def test_coverage_counts_samples_seen_twice_and_never() -> None:
    found = coverage(traces({1: "a"}, samples=(1, 1)))
    assert (found.loops, found.twice, found.never) == (1, ((0, 0, 1),), ((0, 0, 0),))
    assert not found.is_exact
    assert coverage(traces({1: "a"})).is_exact


def test_loops_that_were_left_are_not_judged() -> None:
    left = traces({1: "a"}, samples=(0,))
    left.complete.clear()
    assert coverage(left).loops == 0
