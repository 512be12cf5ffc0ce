"""The comparisons of `benchmarks`: what they judge by, and how they report."""

import sys

import numpy as np
import oracle
import pytest

from benchmarks import __main__ as program
from benchmarks import accuracy

CASE = accuracy.CASES[0]
NARROW = accuracy.CASES[-1]


def errors(ours, peer):
    """Returns errors of bnjax and of two peers, one of them useless."""
    useless = accuracy.Errors(np.nan, np.nan, np.nan)
    ways = dict.fromkeys(accuracy.OURS, accuracy.Errors(*ours))
    return ways | {"Flax": accuracy.Errors(*peer), "Haiku": useless}


def judged(case, ours, peer):
    return list(accuracy.judge(case, errors(ours, peer)))


def test_the_float64_lines_are_the_papers():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(3.0, 2.0, (2, 8, 2, 2, 3)).astype(np.float32)
    var, y, dx = accuracy.oracle(x, dy)
    columns, cotangent = oracle.columns(x), oracle.columns(dy)
    one, zero = np.ones(3), np.zeros(3)
    np.testing.assert_allclose(var, oracle.batch_moments(columns)[1], rtol=1e-12)
    expected = oracle.batch_norm(columns, one, zero)
    np.testing.assert_allclose(oracle.columns(y), expected, rtol=0, atol=1e-12)
    expected = oracle.gradient(columns, one, cotangent)[0]
    np.testing.assert_allclose(oracle.columns(dx), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["bnjax, first step", "Flax, slow variance"])
def test_a_way_reports_the_variance_output_and_gradient_of_the_batch(name):
    assert max(accuracy.errors_of(CASE, [name])[name]) < 1e-6


def test_a_constant_is_measured_against_epsilon():
    right = accuracy.Result(np.zeros(1), np.zeros((2, 1)), np.ones((2, 1)))
    result = accuracy.Result(np.array([1e-7]), np.full((2, 1), 3e-5), np.ones((2, 1)))
    np.testing.assert_allclose(accuracy.compare(result, right), (1e-2, 3e-5, 0))


def test_bnjax_as_good_as_the_best_peer_has_no_faults():
    assert judged(CASE, ours=(1e-7, 2e-7, 3e-6), peer=(1e-8, 1e-7, 3e-6)) == []


def test_bnjax_worse_than_the_best_peer_is_a_fault_of_its_cell():
    found = judged(CASE, ours=(5e-6, 1e-7, 1e-7), peer=(6e-8, 1e-7, 1e-7))
    assert found == [
        f"mean/std 1, {name}: the error of var is 5.0e-06, of the best peer 6.0e-08"
        for name in accuracy.OURS
    ]


def test_bnjax_above_the_bound_is_a_fault_even_where_peers_are_no_better():
    found = judged(CASE, ours=(1e-7, np.nan, 1e-7), peer=(1e-7, np.inf, 1e-7))
    assert "mean/std 1, bnjax, trained: the error of y is nan, not below 1e-05" in found


def test_the_rounding_of_a_narrow_output_is_no_fault():
    assert judged(NARROW, ours=(1e-7, 3e-3, 3e-3), peer=(1e-7, 1e-3, 1e-3)) == []


@pytest.mark.parametrize(
    ("error", "text"),
    [(0.0, "0"), (2.4e-7, "2e-7"), (1.0, "1e0"), (np.inf, "∞"), (np.nan, "NaN")],
)
def test_an_error_has_one_digit(error, text):
    assert accuracy.short(error) == text


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch):
    monkeypatch.setattr(accuracy, "find_spec", lambda module: None)
    monkeypatch.setattr(
        accuracy,
        "errors_of",
        lambda case, names: dict.fromkeys(names, accuracy.Errors(0, 0, 0)),
    )
    monkeypatch.setattr(accuracy, "measure", accuracy.measure.__wrapped__)
    table = accuracy.run()
    assert "| Flax, slow variance |\n" in table
    assert "Not installed, so left out: Haiku, Equinox, PyTorch." in table


def test_the_command_prints_the_table_and_fails_with_the_faults(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "accuracy"])
    monkeypatch.setattr(accuracy, "run", lambda: "the table")
    monkeypatch.setattr(accuracy, "faults", lambda: ["one cell", "another"])
    with pytest.raises(SystemExit, match="one cell\nanother"):
        program.main()
    assert capsys.readouterr().out == "the table\n"
