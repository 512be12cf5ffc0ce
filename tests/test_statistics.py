"""Moments, their merging, and the running values (bnjax.statistics)."""

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import bnjax

# Multiples of 1/8 in a small range: what is compared is our arithmetic, and not how a
# value of 1e-30 beside 1e3 is rounded.
VALUES = st.integers(-400, 400).map(lambda n: n / 8)
BATCHES = hnp.arrays(np.float32, (6, 3), elements=VALUES)
moments_of = jax.jit(bnjax.batch_moments, static_argnames=("feature_axes",))


def normal(shape, mean=3.0, std=2.0, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(mean, std, shape)
    return values.astype(jnp.dtype(dtype))


def stats(mean, var):
    return bnjax.BatchStats(jnp.array(mean, jnp.float32), jnp.array(var, jnp.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_moments_match_the_paper(dtype):
    x = normal((64, 5), dtype=dtype)
    moments = moments_of(jnp.asarray(x))
    chex.assert_type(list(moments), jnp.float32)
    chex.assert_shape(list(moments), (5,))
    for value, right in zip(moments, oracle.batch_moments(x), strict=True):
        np.testing.assert_allclose(value, right, rtol=3e-7)


def test_moments_of_float64_are_float64():
    with jax.enable_x64(True):
        x = normal((32, 2), mean=1e6, dtype="float64")
        moments = moments_of(jnp.asarray(x))
        chex.assert_type(list(moments), jnp.float64)
        np.testing.assert_allclose(moments.var, oracle.batch_moments(x)[1], rtol=1e-14)


def test_moments_of_complex_values_have_a_real_variance():
    x = (normal((16, 3)) + 1j * normal((16, 3), seed=1)).astype(np.complex64)
    moments = moments_of(jnp.asarray(x))
    mean, var, _ = oracle.batch_moments(x)
    chex.assert_type(list(moments), [jnp.complex64, jnp.float32, jnp.float32])
    np.testing.assert_allclose(moments.mean, mean, rtol=3e-7)
    np.testing.assert_allclose(moments.var, var, rtol=3e-7)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5,), ()),
        ((4, 3), -1),
        ((4, 3), 0),
        ((2, 3, 4), 1),
        ((2, 3, 4), (0, 2)),
        ((2, 3, 4), (-1, 0)),
        ((2, 3, 4, 5), -1),
        ((2, 3, 4, 5), 1),
        ((2, 3, 4, 5), (1, 3)),
        ((2, 3, 2, 3, 2), 2),
        ((2, 3, 2, 3, 2), (0, -1)),
    ],
)
def test_moments_of_any_rank_and_axes_match_the_paper(shape, axes):
    x = normal(shape)
    moments = moments_of(jnp.asarray(x), feature_axes=axes)
    named = (axes,) if isinstance(axes, int) else axes
    features = tuple(shape[axis] for axis in sorted(a % len(shape) for a in named))
    chex.assert_shape(list(moments), features)
    mean, var, count = oracle.batch_moments(oracle.columns(x, axes))
    np.testing.assert_allclose(moments.mean.ravel(), mean, rtol=1e-6)
    np.testing.assert_allclose(moments.var.ravel(), var, rtol=1e-6)
    np.testing.assert_array_equal(moments.count.ravel(), count)


@given(BATCHES, hnp.arrays(bool, 6))
def test_masking_rows_equals_dropping_them(x, keep):
    poisoned = jnp.where(keep[:, None], x, jnp.nan)
    masked = moments_of(poisoned, mask=jnp.asarray(keep))
    dropped = oracle.batch_moments(x[keep])
    chex.assert_trees_all_close(tuple(masked), dropped, rtol=1e-6, atol=1e-5)


@given(BATCHES, hnp.arrays(bool, (6, 3)))
def test_masking_elements_counts_per_feature(x, keep):
    poisoned = jnp.where(keep, x, jnp.inf)
    masked = moments_of(poisoned, mask=jnp.asarray(keep))
    right = oracle.batch_moments(x, keep)
    chex.assert_trees_all_close(tuple(masked), right, rtol=1e-6, atol=1e-5)


@given(BATCHES, st.integers(0, 6))
def test_merging_the_parts_gives_the_whole(x, split):
    here = jnp.arange(6) < split
    first, second = moments_of(x, mask=here), moments_of(x, mask=~here)
    merged = bnjax.merge_moments(first, second)
    chex.assert_trees_all_close(merged, moments_of(x), rtol=2e-6, atol=1e-5)


@given(BATCHES, st.permutations(range(6)))
def test_the_order_of_the_batch_does_not_matter(x, order):
    permuted = moments_of(x[np.array(order)])
    chex.assert_trees_all_close(permuted, moments_of(x), rtol=2e-6, atol=1e-5)


def test_jit_changes_no_moment():
    x = jnp.asarray(normal((7, 3)))
    eager = bnjax.batch_moments(x)
    chex.assert_trees_all_close(moments_of(x), eager, rtol=3e-7)


def test_merging_keeps_a_set_as_it_is_when_the_other_is_empty():
    full = bnjax.Moments(jnp.array([3.0]), jnp.array([2.0]), jnp.array([5.0]))
    nothing = bnjax.Moments(*(jnp.array([v]) for v in (jnp.nan, jnp.nan, 0.0)))
    chex.assert_trees_all_equal(bnjax.merge_moments(full, nothing), full)
    chex.assert_trees_all_equal(bnjax.merge_moments(nothing, full), full)


def test_merging_nothing_with_nothing_gives_zeros():
    nothing = bnjax.Moments(*(jnp.zeros(1) for _ in range(3)))
    chex.assert_trees_all_equal(bnjax.merge_moments(nothing, nothing), nothing)


def test_merging_complex_moments_pools_the_distance_of_their_means():
    one = bnjax.Moments(jnp.array([0j]), jnp.array([1.0]), jnp.array([2.0]))
    two = bnjax.Moments(jnp.array([2j]), jnp.array([1.0]), jnp.array([2.0]))
    merged = bnjax.merge_moments(one, two)
    assert (merged.mean[0], merged.var[0], merged.count[0]) == (1j, 2.0, 4.0)


def test_merging_with_nothing_has_finite_gradients():
    x, nothing = jnp.ones((4, 2)), jnp.zeros(4)

    def var(x):
        moments = bnjax.batch_moments(x), bnjax.batch_moments(x, mask=nothing)
        return bnjax.merge_moments(*moments).var.sum()

    chex.assert_tree_all_finite(jax.jit(jax.grad(var))(x))


def test_the_running_variance_is_that_of_the_population():
    x = normal((8, 3))
    new = bnjax.update_batch_stats(
        stats([1.0] * 3, [2.0] * 3), moments_of(jnp.asarray(x)), momentum=0.9
    )
    mean, var = oracle.population([x])
    right = (oracle.moving_average(1, mean, 0.9), oracle.moving_average(2, var, 0.9))
    chex.assert_type(list(new), jnp.float32)
    chex.assert_trees_all_close(tuple(new), right, rtol=1e-6)


@pytest.mark.report(9)
def test_the_running_variance_is_biased_on_request():
    moments = moments_of(jnp.array([[0.0], [2.0]]))
    old = stats([0.0], [0.0])
    new = bnjax.update_batch_stats(old, moments, momentum=0.0, unbiased=False)
    assert new.var[0] == 1.0


@pytest.mark.report(10)
@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_momentum_is_the_weight_of_the_old_value(momentum):
    moments = bnjax.Moments(jnp.array([10.0]), jnp.array([4.0]), jnp.array([5.0]))
    new = bnjax.update_batch_stats(stats([0.0], [1.0]), moments, momentum=momentum)
    right = stats([0.0], [1.0]) if momentum else stats([10.0], [5.0])
    chex.assert_trees_all_equal(new, right)


def test_momentum_may_be_traced():
    moments = bnjax.Moments(jnp.array([10.0]), jnp.array([4.0]), jnp.array([5.0]))
    update = jax.jit(bnjax.update_batch_stats)
    new = update(stats([0.0], [1.0]), moments, momentum=0.9)
    np.testing.assert_allclose(new.mean, [1.0], rtol=1e-6)


@pytest.mark.report(10)
@pytest.mark.parametrize("momentum", [-0.1, 1.9, float("nan")])
def test_momentum_outside_its_range_is_an_error(momentum):
    moments = moments_of(jnp.ones((2, 1)))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]. PyTorch's"):
        bnjax.update_batch_stats(stats([0.0], [1.0]), moments, momentum=momentum)


@pytest.mark.report(14)
@pytest.mark.parametrize(
    ("count", "moves"),
    [(0.0, (False, False)), (1.0, (True, False)), (2.0, (True, True))],
)
def test_only_what_the_count_defines_moves(count, moves):
    old = stats([0.3], [0.7])
    moments = bnjax.Moments(jnp.array([9.0]), jnp.array([9.0]), jnp.array([count]))
    new = bnjax.update_batch_stats(old, moments)
    assert (bool(new.mean != old.mean), bool(new.var != old.var)) == moves


def test_running_values_keep_their_dtype_when_the_batch_is_wider():
    with jax.enable_x64(True):
        moments = moments_of(jnp.ones((2, 1), jnp.float64))
        new = bnjax.update_batch_stats(stats([0.0], [1.0]), moments)
        chex.assert_type(list(new), jnp.float32)


def test_running_values_start_at_zero_and_one_in_any_shape():
    start = bnjax.init_batch_stats((2, 3))
    chex.assert_type(list(start), jnp.float32)
    np.testing.assert_array_equal(start.mean, np.zeros((2, 3)))
    np.testing.assert_array_equal(start.var, np.ones((2, 3)))


def test_integers_are_an_error(monkeypatch):
    # The checks of the tests would speak first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(TypeError, match=r"dtype int32.*Convert first"):
        bnjax.batch_moments(jnp.ones((2, 1), jnp.int32))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (4, r"names axes \[4\], but x has rank 2.*\[-2, 1\]"),
        ((0, -3), r"names axes \[-3\]"),
        ((1, -1), "names an axis of x twice"),
    ],
)
def test_feature_axes_that_do_not_fit_are_an_error(axes, message):
    with pytest.raises(ValueError, match=message):
        bnjax.batch_moments(jnp.ones((2, 3)), feature_axes=axes)


@pytest.mark.report(64)
def test_the_running_values_pass_no_gradient_on():
    def drift(x, stats):
        new = bnjax.batch_norm(x, stats)[1]
        return sum(value.sum() for value in new)

    x, stats = jnp.asarray(normal((7, 2))), bnjax.init_batch_stats(2)
    found = jax.jit(jax.grad(drift, argnums=(0, 1)))(x, stats)
    chex.assert_trees_all_equal(found, jax.tree.map(jnp.zeros_like, (x, stats)))


@pytest.mark.report(47)
def test_the_running_mean_gets_no_gradient_from_the_result():
    x, scale = jnp.asarray(normal((7, 2))), jnp.array([2.0, -0.5])

    def loss(mean):
        stats = bnjax.BatchStats(mean, jnp.ones(2))
        return (bnjax.batch_norm(x, stats, scale=scale)[0] ** 3).sum()

    found = jax.jit(jax.grad(loss))(jnp.array([2.5, -900.0]))
    np.testing.assert_array_equal(found, [0.0, 0.0])
