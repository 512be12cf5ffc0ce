"""`batch_norm`, `normalize` and `inference_affine` (bnjax.functional)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import bnjax

VALUES = st.integers(-400, 400).map(lambda n: n / 8)
BATCHES = hnp.arrays(np.float32, (6, 3), elements=VALUES)
STATIC = ("use_running_average", "update_stats", "feature_axes", "unbiased")
batch_norm = jax.jit(bnjax.batch_norm, static_argnames=STATIC)
normalize = jax.jit(bnjax.normalize, static_argnames="feature_axes")
GAMMA, BETA = np.array([2.0, -0.5, 0.0]), np.array([0.25, 1.0, -3.0])


def normal(shape, mean=3.0, std=2.0, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(mean, std, shape)
    return values.astype(jnp.dtype(dtype))


def affine():
    scale, bias = (jnp.asarray(v, jnp.float32) for v in (GAMMA, BETA))
    return {"scale": scale, "bias": bias}


def some_stats():
    mean, var = jnp.array([1.0, -2.0, 0.5]), jnp.array([2.0, 0.25, 1.0])
    return bnjax.BatchStats(mean, var)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 2**-8), ("float16", 2**-11)]
)
def test_training_is_algorithm_1(dtype, rtol):
    x = normal((32, 3), dtype=dtype)
    y, _ = batch_norm(jnp.asarray(x), bnjax.init_batch_stats(3), **affine())
    chex.assert_type(y, jnp.dtype(dtype))
    # One rounding to the result's dtype, and a few of float32 on the way.
    right = oracle.batch_norm(x, GAMMA, BETA)
    np.testing.assert_allclose(y.astype(jnp.float32), right, rtol=rtol, atol=2e-6)


def test_evaluation_is_algorithm_2():
    x = normal((8, 3))
    y, after = batch_norm(
        jnp.asarray(x), some_stats(), use_running_average=True, **affine()
    )
    right = oracle.inference(x, *map(np.asarray, some_stats()), GAMMA, BETA)
    np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_equal(after, some_stats())


@pytest.mark.report(9)
@pytest.mark.parametrize(("unbiased", "var"), [(True, 1.1), (False, 1.0)])
def test_running_values_follow_the_batch(unbiased, var):
    x = jnp.array([[0.0], [2.0]])
    _, new = batch_norm(x, bnjax.init_batch_stats(1), momentum=0.9, unbiased=unbiased)
    np.testing.assert_allclose((new.mean[0], new.var[0]), (0.1, var), rtol=1e-6)


@pytest.mark.report(34)
def test_update_stats_off_normalizes_alike_and_moves_nothing():
    x = jnp.asarray(normal((6, 3)))
    y, still = batch_norm(x, some_stats(), update_stats=False)
    chex.assert_trees_all_equal(y, batch_norm(x, some_stats())[0])
    chex.assert_trees_all_equal(still, some_stats())


SHAPES = [
    ((7,), ()),
    ((4, 3), 0),
    ((2, 3, 4), 1),
    ((2, 3, 4), (0, -1)),
    ((2, 3, 2, 3), 1),
    ((2, 3, 2, 3), (3, 1)),
    ((2, 1, 3, 2, 2), (-2, 0)),
]


@pytest.mark.report(60)
@pytest.mark.parametrize(
    ("shape", "axes", "evaluate"),
    [*((*case, False) for case in SHAPES), *((*case, True) for case in SHAPES[3:5])],
)
def test_any_rank_and_axes_match_the_paper(shape, axes, evaluate):
    x = normal(shape)
    columns = oracle.columns(x, axes)
    mean, var, _ = oracle.batch_moments(columns)
    features = batch_features(shape, axes)
    right = oracle.inference(columns, mean, var, np.arange(9.0), np.arange(9.0) + 1)
    y, _ = batch_norm(
        jnp.asarray(x),
        bnjax.BatchStats(
            jnp.asarray(mean.reshape(features), jnp.float32),
            jnp.asarray(var.reshape(features), jnp.float32),
        ),
        scale=jnp.arange(float(len(mean))).reshape(features),
        bias=jnp.arange(float(len(mean))).reshape(features) + 1,
        feature_axes=axes,
        use_running_average=evaluate,
    )
    right = oracle.uncolumns(right, shape, axes)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=2e-6)


def batch_features(shape, axes):
    named = (axes,) if isinstance(axes, int) else axes
    return tuple(shape[axis] for axis in sorted(a % len(shape) for a in named))


@given(BATCHES, hnp.arrays(bool, 6))
def test_masking_rows_equals_dropping_them(x, keep):
    poisoned = jnp.where(keep[:, None], x, jnp.nan)
    y, _ = batch_norm(poisoned, some_stats(), mask=jnp.asarray(keep), **affine())
    right = np.zeros((6, 3))
    right[keep] = oracle.batch_norm(x[keep], GAMMA, BETA)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-4)


@given(BATCHES, st.floats(0.5, 4, width=32), VALUES)
def test_shifting_and_scaling_the_input_changes_nothing(x, a, b):
    x = x + np.linspace(0, 9, 6, dtype=np.float32)[:, None] ** 2
    y, _ = batch_norm(x, some_stats(), epsilon=1e-9)
    moved, _ = batch_norm(np.float32(a) * x + np.float32(b), some_stats(), epsilon=1e-9)
    # The input itself is rounded after the shift: 2e2 · 6e-8 over a spread of 10.
    np.testing.assert_allclose(moved, y, atol=3e-5)


@given(BATCHES, st.permutations(range(6)))
def test_permuting_the_batch_permutes_the_result(x, order):
    y, _ = batch_norm(x[np.array(order)], some_stats())
    right = batch_norm(x, some_stats())[0][np.array(order)]
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("evaluate", [False, True], ids=["batch", "running"])
def test_jit_equals_eager(evaluate):
    x = jnp.asarray(normal((6, 3)))
    options = {"use_running_average": evaluate, **affine()}
    eager = bnjax.batch_norm(x, some_stats(), **options)
    chex.assert_trees_all_close(
        batch_norm(x, some_stats(), **options), eager, rtol=1e-6, atol=1e-6
    )


MASKS = {
    "examples": np.array([1, 0]),
    "rows": np.array([[1, 0, 1], [0, 1, 1]]),
    "positions": np.arange(12).reshape(2, 3, 2) % 3 > 0,
    "channels too": np.arange(36).reshape(2, 3, 2, 3) % 4 > 0,
    "one channel for all": (np.arange(12) % 3 > 0).reshape(2, 3, 2, 1),
    "broadcast batch": np.array([1, 0, 1]).reshape(1, 3, 1, 1),
    "everything": np.array(1),
}


@pytest.mark.report(25, 26)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bool") for name in MASKS), ("rows", "int32"), ("rows", "float32")],
)
def test_masks_of_every_kind_match_the_paper(name, dtype):
    x, mask = normal((2, 3, 2, 3)), MASKS[name]
    lined_up = mask.reshape(mask.shape + (1,) * (4 - mask.ndim)) != 0
    full = np.broadcast_to(lined_up, x.shape)
    y, new = batch_norm(
        jnp.where(full, x, jnp.nan),
        some_stats(),
        mask=jnp.asarray(mask, dtype),
        momentum=0.0,
        unbiased=False,
        **affine(),
    )
    columns, kept = oracle.columns(x), oracle.columns(full)
    right = oracle.uncolumns(
        oracle.batch_norm(columns, GAMMA, BETA, 1e-5, kept), x.shape
    )
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(new.var, oracle.batch_moments(columns, kept)[1], 1e-6)


@pytest.mark.report(26)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 2), (4, 3, 1), (4, 2, 3)])
def test_masks_that_do_not_fit_are_an_error(shape):
    with pytest.raises(ValueError, match=r"mask has shape .*\(4,\) for examples"):
        bnjax.batch_norm(
            jnp.ones((4, 3)), bnjax.init_batch_stats(3), mask=jnp.ones(shape)
        )


def test_evaluation_writes_zero_behind_the_mask():
    x = jnp.full((2, 3), jnp.nan).at[0].set(1.0)
    y = normalize(x, *some_stats(), mask=jnp.array([1, 0]), **affine())
    assert not y[1].any()
    chex.assert_tree_all_finite(y)


def test_scale_and_bias_may_differ_between_examples():
    x, gamma = normal((4, 5, 3)), normal((4, 1, 3), seed=1)
    y, _ = batch_norm(
        x, some_stats(), scale=jnp.asarray(gamma), bias=jnp.ones((4, 1, 1))
    )
    plain, _ = batch_norm(x, some_stats())
    np.testing.assert_allclose(y, gamma * plain + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_parameters_that_do_not_fit_are_an_error(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \(4,\), but x has shape"):
        bnjax.batch_norm(
            jnp.ones((2, 3)), bnjax.init_batch_stats(3), **{name: jnp.ones(4)}
        )


@pytest.mark.report(60)
def test_running_values_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match=r"mean has shape \(4,\).*features \(3,\)"):
        bnjax.batch_norm(jnp.ones((2, 3)), bnjax.init_batch_stats(4))


@pytest.mark.report(13)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_running_values_in_half_precision_are_an_error(dtype):
    half = jax.tree.map(lambda v: v.astype(dtype), bnjax.init_batch_stats(1))
    with pytest.raises(
        TypeError, match=r"mean has dtype .* Keep batch_stats in float32"
    ):
        bnjax.batch_norm(jnp.ones((2, 1)), half)


@pytest.mark.report(11)
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
def test_running_values_and_result_keep_their_dtypes(dtype):
    x = jnp.asarray(normal((4, 3), dtype="float32")).astype(dtype)
    y, new = batch_norm(x, some_stats(), **affine())
    chex.assert_type(y, jnp.dtype(dtype))
    chex.assert_type(new.var, jnp.float32)


def test_complex_input_matches_the_paper():
    x = (normal((16, 3)) + 1j * normal((16, 3), seed=1)).astype(np.complex64)
    y, new = batch_norm(x, some_stats(), momentum=0.0, **affine())
    right = oracle.batch_norm(x, GAMMA, BETA)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new.mean, oracle.batch_moments(x)[0], rtol=1e-6)


def test_a_single_element_per_feature_is_an_error():
    with pytest.raises(ValueError, match="one element per feature over all devices"):
        bnjax.batch_norm(jnp.array([[3.0, -7.0]]), bnjax.init_batch_stats(2))


@pytest.mark.report(14)
def test_a_single_valid_element_gives_the_bias_and_keeps_the_variance():
    x, mask = jnp.asarray(normal((4, 3))), jnp.array([0, 1, 0, 0])
    y, new = batch_norm(x, some_stats(), mask=mask, **affine())
    np.testing.assert_array_equal(y[1], BETA)
    chex.assert_trees_all_equal(new.var, some_stats().var)


@pytest.mark.report(5)
@pytest.mark.parametrize("rows", [0, 4], ids=["no examples", "all masked"])
def test_nothing_to_count_keeps_the_running_values_bit_for_bit(rows):
    x, mask = jnp.full((rows, 3), jnp.nan), jnp.zeros(rows)
    y, new = batch_norm(x, some_stats(), mask=mask, **affine())
    assert not y.any()
    chex.assert_trees_all_equal(new, some_stats())


@pytest.mark.report(5)
def test_a_batch_without_examples_needs_no_mask():
    y, new = batch_norm(jnp.zeros((0, 3)), some_stats())
    chex.assert_shape(y, (0, 3))
    chex.assert_trees_all_equal(new, some_stats())


def test_a_poisoned_running_mean_does_not_spoil_the_batch():
    x = jnp.asarray(normal((6, 3)))
    poisoned = some_stats()._replace(mean=jnp.array([jnp.nan, jnp.inf, 0.0]))
    y, _ = batch_norm(x, poisoned)
    np.testing.assert_allclose(y, batch_norm(x, some_stats())[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("absent", ["scale", "bias", "neither"])
def test_the_affine_of_inference_folds_what_is_there(absent):
    options = {k: v for k, v in affine().items() if k != absent}
    multiplier, offset = bnjax.inference_affine(some_stats(), **options)
    right = oracle.inference_affine(
        *map(np.asarray, some_stats()),
        GAMMA if "scale" in options else np.ones(3),
        BETA if "bias" in options else np.zeros(3),
    )
    chex.assert_trees_all_close((multiplier, offset), right, rtol=1e-6)
