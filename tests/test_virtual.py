"""Virtual batches and Batch Renormalization."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import PartitionSpec as P

import bnjax
import bnjax.linen

START = bnjax.BatchStats(jnp.array([1.0, -2.0]), jnp.array([4.0, 0.5]))
SCALE, BIAS = jnp.array([2.0, -1.0]), jnp.array([0.5, 3.0])


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(3.0, 2.0, shape)
    return jnp.asarray(values, jnp.float32)


@jax.jit
def train(x, **options):
    return bnjax.batch_norm(x, START, scale=SCALE, bias=BIAS, **options)


def train_virtual(x, size, **options):
    return jax.jit(
        lambda x: bnjax.batch_norm(
            x, START, scale=SCALE, bias=BIAS, virtual_batch_size=size, **options
        )
    )(x)


# Virtual batches


@pytest.mark.report(57)
@pytest.mark.parametrize(
    ("rows", "size", "bounds"),
    [
        (12, 4, [0, 4, 8, 12]),
        (101, 10, [*range(0, 100, 10), 101]),
        (7, 4, [0, 7]),
        (3, 8, [0, 3]),
        (6, 6, [0, 6]),
    ],
)
def test_groups_of_examples_normalize_each_other(rows, size, bounds):
    x = normal(rows, 3, 2)
    y, _ = train_virtual(x, size)
    groups = [
        oracle.batch_norm(oracle.columns(x[a:b]), np.float64(SCALE), np.float64(BIAS))
        for a, b in itertools.pairwise(bounds)
    ]
    right = np.concatenate(groups).reshape(x.shape)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 5, 12, 50])
def test_the_running_values_move_once_to_all_groups_together(size):
    x = normal(12, 3, 2)
    chex.assert_trees_all_close(train_virtual(x, size)[1], train(x)[1], rtol=1e-6)


def test_a_far_mean_costs_the_pooled_variance_no_accuracy():
    x = jnp.float32(1e6) + normal(12, 3, 2)
    var = np.float64(x).var((0, 1), ddof=1)
    stats = train_virtual(x, 4, momentum=0.0)[1]
    np.testing.assert_allclose(stats.var, var, rtol=1e-5)


def test_a_mask_counts_within_its_group():
    x, mask = normal(8, 2), jnp.array([1, 1, 0, 1, 0, 0, 0, 0], bool)
    poisoned = jnp.where(mask[:, None], x, jnp.nan)
    y, stats = train_virtual(poisoned, 4, mask=mask)
    kept = jnp.array([0, 1, 3])
    right = oracle.batch_norm(x[kept], np.float64(SCALE), np.float64(BIAS))
    np.testing.assert_allclose(y[kept], right, rtol=1e-5)
    assert not y[4:].any()
    chex.assert_trees_all_close(stats, train(x[kept])[1], rtol=1e-6)


def test_scale_and_bias_of_each_example_go_with_their_group():
    x, scale = normal(6, 3, 2), normal(6, 2, seed=1)
    y, _ = bnjax.batch_norm(x, START, scale=scale, virtual_batch_size=3)
    plain, _ = bnjax.batch_norm(x, START, virtual_batch_size=3)
    np.testing.assert_allclose(y, scale[:, None] * plain, rtol=1e-6)


@pytest.mark.report(66)
def test_the_gradient_stays_within_its_group():
    x = normal(8, 2)
    gradient = jax.grad(lambda x: (train_virtual(x, 4)[0][:4] ** 3).sum())(x)
    assert np.abs(gradient[:4]).min() > 0
    assert not gradient[4:].any()


@pytest.mark.report(57)
def test_evaluation_knows_no_groups():
    x = normal(7, 2)
    y, stats = train_virtual(x, 2, use_running_average=True)
    right = bnjax.normalize(x, *START, scale=SCALE, bias=BIAS)
    np.testing.assert_allclose(y, right, rtol=1e-6)
    chex.assert_trees_all_equal(stats, START)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_groups_do_not_depend_on_the_devices(num_devices, check_vma):
    x = normal(16, 3, 2)
    mesh = jax.make_mesh((num_devices,), ("i",), devices=jax.devices()[:num_devices])
    function = jax.shard_map(
        lambda x: train_virtual(x, 4, axis_name="i"),
        mesh=mesh,
        in_specs=P("i"),
        out_specs=(P("i"), P()),
        check_vma=check_vma,
    )
    spread = jax.jit(function)(jax.device_put(x, jax.NamedSharding(mesh, P("i"))))
    chex.assert_trees_all_close(spread, train_virtual(x, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_1_is_an_error(size):
    with pytest.raises(ValueError, match=f"virtual_batch_size={size} must be"):
        train_virtual(normal(4, 2), size)


def test_features_along_the_first_axis_cannot_be_grouped():
    with pytest.raises(ValueError, match="must not be a feature axis"):
        bnjax.batch_norm(normal(2, 5), START, feature_axes=0, virtual_batch_size=2)


def test_a_group_larger_than_a_devices_share_is_an_error():
    with pytest.raises(ValueError, match="more than the 2 examples of this device"):
        jax.vmap(lambda x: train_virtual(x, 4, axis_name="i"), axis_name="i")(
            normal(2, 2, 2)
        )


def test_groups_of_one_value_are_an_error():
    with pytest.raises(ValueError, match="one element per feature"):
        train_virtual(normal(4, 2), 1)


# Batch Renormalization


def renormalized(x, r_max, d_max):
    """The definition, in float64."""
    x, running = np.float64(x), jax.tree.map(np.float64, START)
    mean, std = x.mean(0), np.sqrt(x.var(0) + 1e-5)
    running_std = np.sqrt(running.var + 1e-5)
    r = np.clip(std / running_std, 1 / r_max, r_max)
    d = np.clip((mean - running.mean) / running_std, -d_max, d_max)
    x_hat = (x - mean) / std * r + d
    return x_hat * np.float64(SCALE) + np.float64(BIAS)


@pytest.mark.report(58)
@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.5, 0.3), (3.0, 5.0), (100.0, 100.0)])
def test_renormalization_is_as_defined(limits):
    x = normal(9, 2)
    y, stats = train(x, renorm=bnjax.Renorm(*limits))
    np.testing.assert_allclose(y, renormalized(x, *limits), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(stats, train(x)[1])


@pytest.mark.report(58)
def test_limits_of_1_and_0_are_batch_normalization_bit_for_bit():
    x = normal(9, 2)
    y, _ = train(x, renorm=bnjax.Renorm(1.0, 0.0))
    np.testing.assert_array_equal(y, train(x)[0])


def test_wide_limits_normalize_as_evaluation_does():
    x = normal(9, 2)
    y, _ = train(x, renorm=bnjax.Renorm(1e6, 1e6))
    right = bnjax.normalize(x, *START, scale=SCALE, bias=BIAS)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)


def gradients(function):
    return jax.grad(function, (0, 1, 2))


def of_gradients(function):
    """The gradient of the gradient's square, which asks for second derivatives."""
    return gradients(lambda *args: optax.tree.norm(gradients(function)(*args)) ** 2)


@pytest.mark.report(58)
@pytest.mark.parametrize("derivative", [gradients, of_gradients])
def test_no_gradient_goes_through_the_correction(derivative):
    x, weight = normal(9, 2), normal(9, 2, seed=1)
    var = functools.partial(jnp.var, axis=0, keepdims=True)
    running_std = jnp.sqrt(START.var + 1e-5)
    r = jnp.sqrt(var(x) + 1e-5) / running_std[None]
    d = (x.mean(0, keepdims=True) - START.mean[None]) / running_std[None]

    def direct(x, scale, bias):
        x_hat = (x - x.mean(0, keepdims=True)) / jnp.sqrt(var(x) + 1e-5)
        return (weight * ((x_hat * r + d) * scale[None] + bias[None])).sum()

    def ours(x, scale, bias):
        # So wide that they cut nothing, and with it no derivative.
        renorm = bnjax.Renorm(100.0, 100.0)
        y, _ = bnjax.batch_norm(x, START, scale=scale, bias=bias, renorm=renorm)
        return (weight * y).sum()

    found, right = (derivative(f)(x, SCALE, BIAS) for f in (ours, direct))
    chex.assert_trees_all_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.report(58)
def test_a_schedule_is_traced_and_not_compiled_anew():
    train.clear_cache()
    for r_max in (1.0, 2.0, 3.0):
        train(normal(9, 2), renorm=bnjax.Renorm(r_max, r_max - 1))
    assert train._cache_size() == 1


@pytest.mark.parametrize(
    ("renorm", "message"),
    [
        (bnjax.Renorm(0.5, 0.0), "r_max=0.5 must be at least 1"),
        (bnjax.Renorm(1.0, -1.0), "d_max=-1.0 must be at least 0"),
        (bnjax.Renorm(float("nan"), 0.0), "r_max=nan must be at least 1"),
    ],
)
def test_limits_out_of_range_are_an_error(renorm, message):
    with pytest.raises(ValueError, match=message):
        bnjax.batch_norm(normal(4, 2), START, renorm=renorm)


def test_complex_input_has_no_renormalization():
    x = normal(4, 2).astype(jnp.complex64)
    with pytest.raises(TypeError, match="renorm is for real input"):
        bnjax.batch_norm(x, START, renorm=bnjax.Renorm(2.0, 1.0))
