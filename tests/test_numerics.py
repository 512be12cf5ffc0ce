"""Accuracy: far means, constant channels, half precision, reported inputs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import bnjax
from bnjax.functional import normalize_batch
from bnjax.reduction import local_count, make_reduction

EPSILON = 1e-5
batch_norm = jax.jit(
    bnjax.batch_norm, static_argnames=("use_running_average", "unbiased")
)
batch_moments = jax.jit(bnjax.batch_moments)


def stats(mean, var=1.0):
    mean = jnp.atleast_1d(jnp.asarray(mean, jnp.float32))
    return bnjax.BatchStats(mean, jnp.full_like(mean, var))


def far_batch(ratio, rows=512):
    """Three channels whose mean is `ratio` standard deviations from 0."""
    noise = np.random.default_rng(0).normal(0, 1, (rows, 3))
    return (ratio * np.array([1, -1, 0.5]) + noise).astype(np.float32)


def cubes(x, start):
    return (batch_norm(x, start)[0] ** 3).sum()


RATIOS = pytest.mark.parametrize("ratio", [1e0, 1e2, 1e4, 1e6])
GUESSES = pytest.mark.parametrize(
    "guess", [None, 0.0, 0.3, 3.0, 20.0], ids=lambda g: f"off by {g}"
)


def started(ratio, guess):
    """Running values off by so many standard deviations, or the initial ones."""
    if guess is None:
        return bnjax.init_batch_stats(3)
    return stats(ratio * np.array([1, -1, 0.5]) + guess)


@pytest.mark.report(1)
@RATIOS
@GUESSES
def test_a_far_mean_costs_no_accuracy(ratio, guess):
    x = far_batch(ratio)
    y, new = batch_norm(x, started(ratio, guess), momentum=0.0, unbiased=False)
    mean, var, _ = oracle.batch_moments(x)
    right = oracle.batch_norm(x, np.ones(3), np.zeros(3))
    np.testing.assert_allclose(new.mean, mean, rtol=1e-7, atol=1e-6)
    # About a guess that is q deviations off, sums lose 1.5e-7 · q² of the variance,
    # and q is 4 at most.
    np.testing.assert_allclose(new.var, var, rtol=3e-6)
    np.testing.assert_allclose(y, right, rtol=3e-6, atol=3e-6)


@pytest.mark.report(1)
@RATIOS
@pytest.mark.parametrize("guess", [None, 0.3])
def test_a_far_mean_costs_the_gradient_no_accuracy(ratio, guess):
    x = far_batch(ratio)
    dx = jax.jit(jax.grad(cubes))(x, started(ratio, guess))
    y = oracle.batch_norm(x, np.ones(3), np.zeros(3))
    right, _, _ = oracle.gradient(x, np.ones(3), 3 * y**2)
    np.testing.assert_allclose(dx, right, rtol=2e-5, atol=2e-5)


@pytest.mark.report(1)
@RATIOS
def test_moments_of_a_far_batch_are_those_of_float64(ratio):
    x = far_batch(ratio)
    moments, right = batch_moments(x), oracle.batch_moments(x)
    chex.assert_trees_all_close(tuple(moments), right, rtol=3e-7, atol=1e-7)


@pytest.mark.report(42)
@RATIOS
def test_evaluation_subtracts_the_mean_first(ratio):
    x = far_batch(ratio)
    start = started(ratio, 0.0)
    y, _ = batch_norm(x, start, use_running_average=True)
    right = oracle.inference(x, *map(np.asarray, start), np.ones(3), np.zeros(3))
    np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)


CONSTANTS = [0.0, 3.0, 1000.1, -12345.678, 1e5, 9999991.0, 1e7]


@pytest.mark.report(2)
@pytest.mark.parametrize("rows", [1000, 4099])
@pytest.mark.parametrize("start", ["initial", "near", "exact"])
def test_constant_channels_give_the_bias(rows, start):
    constants = np.array(CONSTANTS, np.float32)
    begin = {"initial": 0 * constants, "near": constants * 1.0001, "exact": constants}
    bias = jnp.arange(float(len(CONSTANTS)))
    x = jnp.broadcast_to(jnp.asarray(constants), (rows, len(CONSTANTS)))
    y, _ = batch_norm(x, stats(begin[start]), bias=bias)
    np.testing.assert_allclose(y, np.broadcast_to(bias, x.shape), atol=1e-3)


def test_a_constant_channel_beside_a_live_one_has_finite_gradients():
    x = jnp.asarray(far_batch(1.0)).at[:, 1].set(12345.678)
    dx = jax.jit(jax.grad(cubes))(x, bnjax.init_batch_stats(3))
    chex.assert_tree_all_finite(dx)
    np.testing.assert_allclose(dx[:, 1], 0, atol=1e-6)


@pytest.mark.parametrize("std", [1e-2, 1e-3])
def test_a_nearly_dead_channel_is_as_accurate_as_a_live_one(std):
    x = (3 + std * far_batch(0.0)).astype(np.float32)
    y, _ = batch_norm(x, stats([4.0, 2.95, 3.0]))
    right = oracle.batch_norm(x, np.ones(3), np.zeros(3))
    np.testing.assert_allclose(y, right, rtol=5e-5, atol=5e-5)


@pytest.mark.report(11)
@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [
        ("float16", 6e4, 100.0),
        ("float16", 0.0, 1e4),
        ("float16", 1e3, 1.0),
        ("bfloat16", 256.0, 4.0),
        ("bfloat16", 1e18, 1e17),
    ],
)
def test_half_precision_is_limited_by_its_own_rounding(dtype, mean, std):
    noise = np.random.default_rng(0).normal(mean, std, (256, 3))
    x = noise.astype(jnp.dtype(dtype))
    y, new = batch_norm(x, stats(np.zeros(3)), momentum=0.0, unbiased=False)
    right = oracle.batch_norm(x, np.ones(3), np.zeros(3))
    chex.assert_type([y, *new], [jnp.dtype(dtype), jnp.float32, jnp.float32])
    rounding = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(y.astype(jnp.float32), right, rounding * 1.01, 3e-6)
    np.testing.assert_allclose(new.var, oracle.batch_moments(x)[1], rtol=1e-6)


def test_the_backward_pass_keeps_half_precision_input_as_it_came():
    x = jnp.asarray(far_batch(1.0), jnp.bfloat16)
    layer = jax.jit(lambda x: batch_norm(x, bnjax.init_batch_stats(3))[0])
    _, pull = jax.vjp(layer, x)
    large = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert [leaf.dtype for leaf in large] == [jnp.bfloat16]


@pytest.mark.report(43)
def test_values_whose_squares_overflow_about_0_are_normalized_about_their_mean():
    x = (1e20 + 1e15 * far_batch(0.0)).astype(np.float32)
    y, _ = batch_norm(x, bnjax.init_batch_stats(3))
    np.testing.assert_allclose(
        y, oracle.batch_norm(x, np.ones(3), np.zeros(3)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_in_its_channel(value):
    x = jnp.asarray(far_batch(1e4)).at[7, 1].set(value)
    y, new = batch_norm(x, bnjax.init_batch_stats(3))
    clean, right = batch_norm(jnp.asarray(far_batch(1e4)), bnjax.init_batch_stats(3))
    sides = np.array([0, 2])
    np.testing.assert_allclose(y[:, sides], clean[:, sides], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(new.var[sides], right.var[sides], rtol=1e-6)


def test_two_passes_are_as_accurate_without_a_guess():
    x = far_batch(1e6)
    transform = jax.jit(
        lambda x: normalize_batch(x, bnjax.init_batch_stats(3), two_pass=True)
    )
    y, moments = transform(x)
    right = oracle.batch_norm(x, np.ones(3), np.zeros(3))
    np.testing.assert_allclose(y, right, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(moments.var, oracle.batch_moments(x)[1], rtol=3e-7)


def test_counts_above_2_to_the_24_are_right():
    count = 2**24 + 2**10  # where a float32 that is raised by ones stands still
    mask = jnp.ones((count, 1), bool)
    found = local_count((count, 3), mask, make_reduction(2, -1))
    np.testing.assert_array_equal(found, np.full(3, count))


@pytest.mark.report(1)
def test_report_1_raw_values_of_4096():
    x = np.tile(4096 + np.array([-1.5, -0.5, 0.5, 1.5], np.float32), 64)[:, None]
    y, new = batch_norm(x, stats(0.0), momentum=0.0, unbiased=False)
    dx = jax.jit(jax.grad(cubes))(x, stats(0.0))
    assert new.var[0] == 1.25
    np.testing.assert_allclose(y[0], -1.34164, atol=1e-5)
    assert jnp.abs(dx).max() < 5


@pytest.mark.report(2)
@pytest.mark.parametrize("constant", [12345.678, 1000.1])
def test_report_2_a_dead_camera(constant):
    y, _ = batch_norm(jnp.full((1000, 1), constant), stats(0.0))
    np.testing.assert_allclose(y, 0, atol=2e-5)


@pytest.mark.report(6)
def test_report_6_nan_in_the_padding():
    x, mask = jnp.array([[1.0], [2.0], [3.0], [jnp.nan]]), jnp.array([1, 1, 1, 0])

    def loss(x, scale, bias):
        return (bnjax.batch_norm(x, stats(0.0), scale=scale, bias=bias, mask=mask)[0]
                ** 3).sum()  # fmt: skip

    one = jnp.ones(1)
    dx, dscale, dbias = jax.jit(jax.grad(loss, (0, 1, 2)))(x, one, 0 * one)
    np.testing.assert_allclose(dx[:, 0], [1.837, -3.674, 1.837, 0], atol=1e-3)
    # Σ 3 y² · y and Σ 3 y², with y = ∓1.2247, 0.
    np.testing.assert_allclose((dscale[0], dbias[0]), (0, 8.99987), atol=1e-4)


@pytest.mark.report(11)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [("float16", [200, 300, 400, 500]), ("bfloat16", [256, 258, 260, 262])],
)
def test_report_11_statistics_in_half_precision(dtype, values):
    x = jnp.array(values, dtype)[:, None]
    y, new = batch_norm(x, stats(0.0))
    right = oracle.batch_norm(np.asarray(x), np.ones(1), np.zeros(1))
    np.testing.assert_allclose(y.astype(jnp.float32), right, rtol=2**-8)
    chex.assert_type(list(new), jnp.float32)


@pytest.mark.report(42)
def test_report_42_evaluation_far_from_0():
    x = jnp.array([[1e6 + 0.5]])
    y, _ = batch_norm(x, stats(1e6, 0.01), use_running_average=True)
    np.testing.assert_allclose(y, [[4.99750]], rtol=1e-5)


@pytest.mark.report(43)
def test_a_sum_of_squares_may_be_larger_than_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1e18, (4096, 2)), jnp.float32)
    y, moments = jax.jit(lambda x: normalize_batch(x, bnjax.init_batch_stats(2)))(x)
    right = oracle.batch_norm(x, np.ones(2), np.zeros(2))
    np.testing.assert_allclose(moments.var, np.float64(x).var(0), rtol=1e-5)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)
