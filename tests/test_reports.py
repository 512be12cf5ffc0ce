"""What users of other libraries reported, with their numbers: the pure functions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bnjax

START = bnjax.init_batch_stats(1)
# Two devices: one full, one with a single value behind a mask that hides poison.
UNEVEN = jnp.array([[1.0, 1, 1, 1], [5, jnp.nan, jnp.nan, jnp.nan]])[..., None]
MASK = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]])


def over_two(function, *args):
    return jax.pmap(function, axis_name="i", devices=jax.devices()[:2])(*args)


def sharded_gradients(check_vma, reduce):
    """dγ and dβ of mean(w · y) for x = 0..7 on four devices."""
    x, weight = jnp.arange(8.0)[:, None], jnp.linspace(1.0, -2.0, 8)[:, None]

    def here(params, x, weight):
        def loss(params):
            y, _ = bnjax.batch_norm(x, START, **params, axis_name="i")
            value = (weight * y).mean()
            return jax.lax.pmean(value, "i") if reduce == "loss" else value

        gradient = jax.grad(loss)(params)
        return jax.lax.pmean(gradient, "i") if reduce == "gradient" else gradient

    params = {"scale": jnp.ones(1), "bias": jnp.zeros(1)}
    grid = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        here, mesh=grid, in_specs=(P(), P("i"), P("i")), out_specs=P(),
        check_vma=check_vma)  # fmt: skip
    return jax.jit(mapped)(params, x, weight)


@pytest.mark.report(3)
@pytest.mark.parametrize(("check_vma", "reduce"), [(True, "loss"), (False, "gradient")])
def test_report_3_the_right_spelling_of_a_train_step(check_vma, reduce):
    right = {"scale": np.array([-0.98198]), "bias": np.array([-0.5])}
    chex.assert_trees_all_close(sharded_gradients(check_vma, reduce), right, rtol=1e-5)


@pytest.mark.report(4, 16)
def test_reports_4_and_16_uneven_devices_are_pooled_bit_for_bit_alike():
    def here(x, mask):
        options = {"axis_name": "i", "mask": mask}
        moments = bnjax.batch_moments(x, **options)
        return moments, bnjax.batch_norm(x, START, momentum=0.9, **options)[1]

    moments, new = over_two(here, UNEVEN, MASK)
    np.testing.assert_allclose(moments.mean[0], 1.8, rtol=1e-6)
    np.testing.assert_allclose(moments.var[0], 2.56, rtol=1e-6)
    np.testing.assert_allclose(new.var[0], 1.22, rtol=1e-6)
    first, second = (jax.tree.map(lambda v, k=k: v[k], (moments, new)) for k in (0, 1))
    chex.assert_trees_all_equal(first, second)


@pytest.mark.report(5)
def test_report_5_a_device_without_valid_examples_adds_nothing():
    mask = MASK.at[1].set(0)
    here = functools.partial(bnjax.batch_norm, axis_name="i", momentum=0.0)
    y, new = over_two(lambda x, mask: here(x, START, mask=mask), UNEVEN, mask)
    np.testing.assert_allclose((new.mean[1], new.var[1]), ([1.0], [0.0]), atol=1e-7)
    assert not y[1].any()


@pytest.mark.report(14)
def test_report_14_a_single_example_is_an_error():
    with pytest.raises(ValueError, match="one element per feature"):
        bnjax.batch_norm(jnp.array([[3.0, -7.0]]), bnjax.init_batch_stats(2))


@pytest.mark.report(14)
def test_report_14_a_single_valid_example_gives_the_bias_and_moves_no_variance():
    x, bias = jnp.array([[3.0, -7.0]]), jnp.array([0.5, 0.25])
    start = bnjax.init_batch_stats(2)
    y, new = jax.jit(bnjax.batch_norm)(x, start, bias=bias, mask=jnp.ones(1))
    np.testing.assert_array_equal(y, bias[None])
    np.testing.assert_array_equal(new.var, start.var)


@pytest.mark.report(17)
def test_report_17_variance_between_devices_counts():
    x = jnp.array([[0.0, 0], [10, 10]])[..., None]
    moments = over_two(functools.partial(bnjax.batch_moments, axis_name="i"), x)
    np.testing.assert_array_equal(moments.var, [[25.0], [25.0]])


@pytest.mark.report(18)
def test_report_18_the_gradient_of_uneven_devices():
    def loss(x, mask, axis_name=None):
        y, _ = bnjax.batch_norm(x, START, mask=mask, axis_name=axis_name)
        return (y**3).sum()

    found = over_two(jax.grad(functools.partial(loss, axis_name="i")), UNEVEN, MASK)
    valid = jnp.array([1.0, 1, 1, 1, 5])[:, None]
    right = jax.jit(jax.grad(loss))(valid, jnp.ones(5))
    np.testing.assert_allclose(found[MASK > 0], right, rtol=1e-4, atol=1e-5)
    assert not found[MASK == 0].any()


@pytest.mark.report(22)
@pytest.mark.parametrize("kind", list(AxisType)[:2], ids=str)
def test_report_22_sharded_jit_is_one_batch(kind):
    x = jnp.asarray(np.random.default_rng(0).normal(3, 2, (16, 3)), jnp.float32)
    sharding = NamedSharding(jax.make_mesh((4,), ("d",), axis_types=(kind,)), P("d"))
    norm = jax.jit(bnjax.batch_norm)
    found = norm(jax.device_put(x, sharding), bnjax.init_batch_stats(3))
    chex.assert_trees_all_close(
        found, norm(x, bnjax.init_batch_stats(3)), rtol=1e-6, atol=1e-6
    )


@pytest.mark.report(25)
def test_report_25_padded_sequences():
    x = jnp.array([1.0, 2, 3, 4, 5, 0, 0, 0, 0, 0])[None, :, None]
    mask = jnp.arange(10)[None] < 5
    moments = jax.jit(bnjax.batch_moments)(x, mask=mask)
    assert (moments.mean[0], moments.var[0], moments.count[0]) == (3, 2, 5)


@pytest.mark.report(26)
def test_report_26_a_mask_of_fewer_axes():
    y, _ = jax.jit(bnjax.batch_norm)(
        jnp.ones((1, 2, 3, 4)), bnjax.init_batch_stats(4), mask=jnp.ones((1, 2, 1))
    )
    np.testing.assert_array_equal(y, np.zeros((1, 2, 3, 4)))


@pytest.mark.report(26)
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3), (2, 3, 4)], ids=str)
def test_report_26_a_mask_counts_all_that_it_covers(shape, dtype):
    x, mask = jnp.arange(120.0).reshape(2, 3, 4, 5), np.zeros(shape, dtype)
    mask[0] = 1
    moments = jax.jit(bnjax.batch_moments)(x, mask=jnp.asarray(mask))
    np.testing.assert_array_equal(moments.count, np.full(5, 12))
    np.testing.assert_allclose(moments.mean, x[0].mean((0, 1)), rtol=1e-6)


@pytest.mark.report(43)
@pytest.mark.parametrize(("size", "right"), [(1e19, [1, -1]), (1e20, [0, 0])], ids=str)
def test_report_43_where_squares_overflow_the_result_is_the_bias(size, right):
    x, bias = jnp.array([[size], [-size]]), jnp.array([0.5])
    y, new = jax.jit(bnjax.batch_norm)(x, START, bias=bias)
    np.testing.assert_allclose(y[:, 0] - 0.5, right, rtol=1e-5)
    assert jnp.isinf(new.var[0]) == (size == 1e20)


@pytest.mark.report(57)
def test_report_57_evaluation_of_101_rows_knows_no_groups_of_10():
    x = np.float32(np.random.default_rng(0).normal(3, 2, (101, 2)))
    stats = bnjax.BatchStats(jnp.array([1.0, 2]), jnp.array([4.0, 9]))
    options = {"use_running_average": True, "virtual_batch_size": 10}
    y, _ = bnjax.batch_norm(jnp.asarray(x), stats, **options)
    np.testing.assert_allclose(y, (x - [1, 2]) / [2, 3], rtol=1e-5, atol=1e-5)


@pytest.mark.report(60)
def test_report_60_the_layout_makes_no_difference():
    x = np.random.default_rng(0).normal(3, 2, (2, 65, 3, 2)).astype(np.float32)
    stats = bnjax.init_batch_stats(65)
    norm = jax.jit(bnjax.batch_norm, static_argnames="feature_axes")
    first, new = norm(x, stats, feature_axes=1)
    last, same = norm(np.moveaxis(x, 1, -1), stats)
    np.testing.assert_allclose(np.moveaxis(first, 1, -1), last, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(new, same, rtol=1e-6)
