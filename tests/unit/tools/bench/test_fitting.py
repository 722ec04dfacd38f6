"""Least squares without negative parameters."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.tools.bench.projection import fit


def test_parameters_that_made_the_rows_come_back() -> None:
    columns = {"a": [1.0, 1.0, 1.0, 1.0], "b": [64.0, 32.0, 16.0, 8.0], "c": [0.0, 1e6, 2e6, 5e6]}
    truth = {"a": 0.003, "b": 0.0005, "c": 2e-9}
    rows = [sum(truth[name] * columns[name][i] for name in truth) for i in range(4)]
    assert fit(columns, rows) == pytest.approx(truth)


def test_a_parameter_that_would_be_negative_is_zero() -> None:
    found = fit({"slope": [1.0, 2.0, 3.0], "constant": [1.0, 1.0, 1.0]}, [0.9, 2.0, 3.1])
    assert found["constant"] == 0
    assert found["slope"] == pytest.approx(14.2 / 14)


def test_of_columns_that_cannot_be_told_apart_the_first_is_taken() -> None:
    assert fit({"sample": [8.0], "overhead": [1.0]}, [4.0]) == {"sample": 0.5, "overhead": 0.0}
    assert fit({"byte": [1e6], "latency": [4.0]}, [0.01])["latency"] == 0


def test_nothing_to_fit() -> None:
    assert fit({"byte": [], "latency": []}, []) == {"byte": 0.0, "latency": 0.0}
    assert fit({"byte": [0.0]}, [1.0]) == {"byte": 0.0}


def test_it_is_the_least_of_all_squares() -> None:
    dice = np.random.default_rng(0)
    columns = {name: dice.random(6).tolist() for name in "abc"}
    targets = dice.random(6).tolist()
    found = fit(columns, targets)
    matrix = np.array([columns[name] for name in "abc"]).T

    def error(values: list[float]) -> float:
        return float(((matrix @ values - targets) ** 2).sum())

    least = error(list(found.values()))
    tried = [
        np.clip(np.array(list(found.values())) + dice.normal(0, 0.1, 3), 0, None)
        for _ in range(300)
    ]
    assert min(map(error, tried)) >= least
