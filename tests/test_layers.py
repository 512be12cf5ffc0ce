import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from networks import images

from bnjax.models.layers import (
    ExampleDropout,
    average_pool,
    local_response_norm,
    max_pool,
)

PADDINGS = {
    "ceil": (2, ((0, 1), (0, 1)), (2, 8, 8, 3)),
    "odd": (2, ((1, 1), (1, 1)), (2, 7, 7, 3)),
    "mixed": (2, ((1, 1), (0, 1)), (2, 7, 8, 3)),
    "stride 1": (1, ((1, 1), (1, 1)), (2, 7, 5, 3)),
}


def reference_max_pool(x, stride, padding):
    strides = (1, stride, stride, 1)
    pads = ((0, 0), *padding, (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), strides, pads)


def reference_average_pool(x):
    pads = ((0, 0), (1, 1), (1, 1), (0, 0))
    total = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), pads)
    return total / 9


@pytest.mark.report(54)
@pytest.mark.parametrize(
    ("stride", "padding", "shape"), PADDINGS.values(), ids=PADDINGS
)
def test_max_pool_and_its_gradient_match_reduce_window(stride, padding, shape):
    x = images(*shape) - 5  # below 0, so that zeros as padding would show
    expected, pull_expected = jax.vjp(
        lambda x: reference_max_pool(x, stride, padding), x
    )
    actual, pull = jax.vjp(lambda x: max_pool(x, stride, padding), x)
    np.testing.assert_array_equal(actual, expected)
    g = images(*expected.shape, seed=1)
    np.testing.assert_allclose(pull(g)[0], pull_expected(g)[0], rtol=1e-6, atol=1e-6)


def test_max_pool_has_the_derivatives_of_finite_differences():
    with jax.enable_x64(True):
        values = np.random.default_rng(0).permutation(98).astype(float)
        x = jnp.asarray(values.reshape(1, 7, 7, 2))
        check_grads(lambda x: max_pool(x, 2, ((1, 1), (1, 1))), (x,), order=2)


def test_max_pool_keeps_the_sum_of_the_gradient_among_ties():
    x = jnp.zeros((1, 8, 8, 1))
    y, pull = jax.vjp(lambda x: max_pool(x, 2, ((0, 1), (0, 1))), x)
    g = images(*y.shape)
    np.testing.assert_allclose(pull(g)[0].sum(), g.sum(), rtol=1e-5)


def test_max_pool_keeps_nan_in_its_windows():
    x = jnp.zeros((1, 8, 8, 1)).at[0, 4, 4, 0].set(jnp.nan)
    y = max_pool(x, 2, ((0, 1), (0, 1)))
    np.testing.assert_array_equal(y, reference_max_pool(x, 2, ((0, 1), (0, 1))))


@pytest.mark.report(54)
def test_average_pool_and_its_gradient_match_reduce_window():
    x = images(2, 7, 5, 3)
    expected, pull_expected = jax.vjp(reference_average_pool, x)
    actual, pull = jax.vjp(average_pool, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    g = images(*x.shape, seed=1)
    np.testing.assert_allclose(pull(g)[0], pull_expected(g)[0], rtol=1e-5, atol=1e-6)


def lrn_oracle(x):
    """Returns GoogLeNet's normalization of `(N, C)`, element by element."""
    x = np.asarray(x, np.float64)
    y = np.empty_like(x)
    for n, c in np.ndindex(x.shape):
        total = sum(x[n, k] ** 2 for k in range(max(0, c - 2), min(c + 3, x.shape[1])))
        y[n, c] = x[n, c] / (1 + 1e-4 / 5 * total) ** 0.75
    return y


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_local_response_norm_matches_the_oracle(channels):
    x = 100 * images(4, channels)
    np.testing.assert_allclose(local_response_norm(x), lrn_oracle(x), rtol=1e-5)


def test_local_response_norm_of_bfloat16_sums_in_float32():
    x = (10 * images(4, 8)).astype(jnp.bfloat16)
    y = local_response_norm(x)
    chex.assert_type(y, jnp.bfloat16)
    # Rounded once, by half of the last of 8 significant bits.
    np.testing.assert_allclose(y.astype(jnp.float32), lrn_oracle(x), rtol=2**-8)


def dropped(x, axis_name=None):
    dropout = ExampleDropout(0.4, axis_name)
    return dropout.apply({}, x, train=True, rngs={"dropout": jax.random.key(0)})


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_dropout_does_not_depend_on_the_number_of_devices(devices):
    x = jnp.ones((8, 50))
    mesh = Mesh(jax.devices()[:devices], "batch")
    split = jax.shard_map(
        functools.partial(dropped, axis_name="batch"),
        mesh=mesh,
        in_specs=P("batch"),
        out_specs=P("batch"),
    )
    np.testing.assert_array_equal(jax.jit(split)(x), dropped(x))


def test_dropout_over_a_tuple_of_axes_numbers_rows_in_their_order():
    x = jnp.ones((8, 50))
    mesh = Mesh(np.reshape(jax.devices(), (2, 2)), ("host", "chip"))
    split = jax.shard_map(
        functools.partial(dropped, axis_name=("host", "chip")),
        mesh=mesh,
        in_specs=P(("host", "chip")),
        out_specs=P(("host", "chip")),
    )
    np.testing.assert_array_equal(jax.jit(split)(x), dropped(x))


def test_dropout_zeroes_its_rate_and_scales_up_the_rest():
    y = dropped(jnp.ones((100, 100)))
    np.testing.assert_allclose(jnp.unique(y), [0, 1 / 0.6], rtol=1e-6)
    # 10 000 draws: the standard deviation of the share is 0.0049.
    np.testing.assert_allclose((y == 0).mean(), 0.4, atol=0.02)


def test_dropout_draws_anew_for_every_example():
    y = dropped(jnp.ones((2, 100)))
    assert (y[0] != y[1]).any()


def test_dropout_needs_no_key_in_evaluation():
    x = images(2, 3)
    y = ExampleDropout(0.4, "batch").apply({}, x, train=False)
    np.testing.assert_array_equal(y, x)
