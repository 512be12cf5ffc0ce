"""Running values: cumulative, debiased, pooled, and the same on all devices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import bnjax
from bnjax.linen import BatchNorm
from bnjax.statistics import debias_batch_stats

COUNTED = bnjax.CountedBatchStats(*bnjax.init_batch_stats(2), jnp.zeros(2))


def batches(number=5, rows=8, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jnp.float32(rng.normal(10 * step, 1 + step, (rows, 2)))
        for step in range(number)
    ]


def train(module, variables, *xs, **options):
    for x in xs:
        options = {"use_running_average": False, **options}
        _, new = module.apply(variables, x, **options, mutable=["batch_stats"])
        variables = {**variables, **new}
    return variables


def initial(module):
    return module.init(jax.random.key(0), jnp.zeros((8, 2)), use_running_average=False)


# momentum=None


def test_a_momentum_of_none_averages_over_the_calls():
    stats = COUNTED
    for x in batches():
        _, stats = bnjax.batch_norm(x, stats, momentum=None)
    means = np.mean([x.mean(0) for x in np.float64(batches())], 0)
    variances = np.mean([x.var(0, ddof=1) for x in np.float64(batches())], 0)
    chex.assert_trees_all_close(stats[:2], (means, variances), rtol=1e-6)
    np.testing.assert_array_equal(stats.count, [5, 5])


def test_a_call_without_anything_to_count_is_no_call():
    moments = bnjax.batch_moments(batches()[1])
    stats = bnjax.update_batch_stats(COUNTED, moments, momentum=None)
    empty = moments._replace(count=jnp.array([0.0, 1.0]))
    again = bnjax.update_batch_stats(stats, empty, momentum=None)
    chex.assert_trees_all_equal(again, stats)


def test_a_momentum_of_none_without_a_count_is_an_error():
    with pytest.raises(ValueError, match="give CountedBatchStats"):
        bnjax.batch_norm(batches()[0], bnjax.init_batch_stats(2), momentum=None)


def test_the_module_keeps_the_count():
    module = BatchNorm(momentum=None)
    stats = train(module, initial(module), *batches())["batch_stats"]
    means = np.mean([x.mean(0) for x in batches()], 0)
    np.testing.assert_allclose(stats["mean"], means, rtol=1e-6)
    np.testing.assert_array_equal(stats["count"], [5, 5])


# debias


@pytest.mark.report(44, 46)
@pytest.mark.parametrize("calls", [1, 3, 5])
@pytest.mark.parametrize("keep", [0.0, 0.9, 0.999])
def test_debiased_values_are_averages_of_what_was_seen(calls, keep):
    module = BatchNorm(momentum=keep, debias=True, epsilon=0.0)
    xs = batches(calls)
    variables = train(module, initial(module), *xs)
    weights = keep ** np.arange(calls)[::-1]
    mean = np.average([x.mean(0) for x in np.float64(xs)], axis=0, weights=weights)
    var = np.average(
        [x.var(0, ddof=1) for x in np.float64(xs)], axis=0, weights=weights
    )
    y = module.apply(variables, xs[0], use_running_average=True)
    right = (np.float64(xs[0]) - mean) / np.sqrt(var)
    np.testing.assert_allclose(y, right, rtol=1e-4, atol=1e-5)


@pytest.mark.report(44)
def test_before_the_first_call_debiased_values_read_as_0_and_1():
    module, x = BatchNorm(debias=True, epsilon=0.0), batches()[2]
    variables = initial(module)
    chex.assert_trees_all_equal(
        variables["batch_stats"], {n: jnp.zeros(2) for n in ("mean", "var", "count")}
    )
    np.testing.assert_array_equal(
        module.apply(variables, x, use_running_average=True), x
    )


def test_a_momentum_of_1_has_seen_nothing():
    stats = bnjax.CountedBatchStats(jnp.zeros(2), jnp.zeros(2), jnp.full(2, 3.0))
    read = debias_batch_stats(stats, 1.0)
    chex.assert_trees_all_equal(read, bnjax.init_batch_stats(2))


def test_a_debiased_average_over_calls_is_the_average():
    stats = bnjax.CountedBatchStats(jnp.ones(2), jnp.full(2, 4.0), jnp.full(2, 3.0))
    read = debias_batch_stats(stats, None)
    chex.assert_trees_all_close(read, bnjax.BatchStats(*stats[:2]))


# Pooling


class Twice(nn.Module):
    """One layer that is called twice: its last call would win."""

    momentum: float | None = 0.9

    @nn.compact
    def __call__(self, x, use_running_average):
        layer = BatchNorm(momentum=self.momentum, name="bn")
        a, b = jnp.split(x, 2)
        return layer(a, use_running_average), layer(b, use_running_average)


@pytest.mark.report(35)
@pytest.mark.parametrize("momentum", [0.9, None])
def test_pooled_calls_move_the_running_values_once(momentum):
    module, x = Twice(momentum=momentum), jnp.concatenate(batches(4))
    variables = train(module, initial(module), x)
    start = variables["batch_stats"]
    pooling = {**variables, "batch_stats": bnjax.start_pooling(start)}
    for part in jnp.split(x + 3, 2):
        pooling = train(module, pooling, part)
    end = bnjax.finish_pooling(pooling["batch_stats"])
    layer = BatchNorm(momentum=momentum)
    variables = {**layer.init(jax.random.key(0), x, True), "batch_stats": start["bn"]}
    at_once = train(layer, variables, x + 3)
    chex.assert_trees_all_close(end["bn"], at_once["batch_stats"], rtol=1e-5)


@pytest.mark.report(35)
def test_pooling_goes_through_a_scan():
    module, x = BatchNorm(), jnp.stack(batches(4))
    variables = initial(module)

    def call(stats, x):
        _, new = module.apply(
            {**variables, "batch_stats": stats}, x, False, mutable=["batch_stats"]
        )
        return new["batch_stats"], None

    start = bnjax.start_pooling(variables["batch_stats"])
    end = bnjax.finish_pooling(jax.jit(lambda s: jax.lax.scan(call, s, x)[0])(start))
    at_once = train(module, variables, x.reshape(-1, 2))["batch_stats"]
    chex.assert_trees_all_close(end, at_once, rtol=1e-6)


def test_pooling_twice_is_an_error():
    stats = bnjax.start_pooling({"bn": {"mean": jnp.zeros(1), "var": jnp.ones(1)}})
    with pytest.raises(ValueError, match="call finish_pooling first"):
        bnjax.start_pooling(stats)


# The same on all devices


@pytest.mark.report(62)
@pytest.mark.parametrize("axis_name", ["i", ("i",)])
def test_a_running_mean_that_varies_over_the_devices_is_an_error(axis_name):
    mesh = jax.make_mesh((4,), ("i",))

    def here(x, mean):
        stats = bnjax.BatchStats(mean, jnp.ones(2))
        return bnjax.batch_norm(x, stats, axis_name=axis_name)[0]

    mapped = jax.shard_map(here, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x, means = (
        jax.device_put(np.float32(value), jax.NamedSharding(mesh, P("i")))
        for value in (np.zeros((8, 2)), np.zeros(8))
    )
    with pytest.raises(ValueError, match=r"differ between the devices of \['i'\]"):
        jax.jit(mapped)(x, means)


def test_a_running_mean_may_vary_over_another_axis():
    mesh = jax.make_mesh((2, 2), ("outer", "inner"))

    def here(x, mean):
        stats = bnjax.BatchStats(mean, jnp.ones(2))
        return bnjax.batch_norm(x, stats, axis_name="inner")[1].mean

    both, outer = P(("outer", "inner")), P("outer")
    x = jax.device_put(batches(1)[0], jax.NamedSharding(mesh, both))
    means = jax.device_put(np.zeros(4, np.float32), jax.NamedSharding(mesh, outer))
    mapped = jax.shard_map(here, mesh=mesh, in_specs=(both, outer), out_specs=outer)
    expected = 0.01 * batches(1)[0].reshape(2, 4, 2).mean(1).reshape(-1)
    np.testing.assert_allclose(jax.jit(mapped)(x, means), expected, rtol=1e-5)


# What was loaded


def evaluate_core(stats):
    return bnjax.batch_norm(jnp.ones((4, 2)), stats, use_running_average=True)


def evaluate_linen(stats):
    variables = {**initial(BatchNorm()), "batch_stats": stats._asdict()}
    return BatchNorm().apply(variables, jnp.ones((4, 2)), True)


@pytest.mark.report(32)
@pytest.mark.parametrize("wrong", [-2e-5, np.nan])
@pytest.mark.parametrize("evaluate", [evaluate_core, evaluate_linen])
def test_a_variance_that_is_none_is_an_error_in_evaluation(wrong, evaluate):
    stats = bnjax.BatchStats(jnp.zeros(2), jnp.array([1.0, wrong]))
    with pytest.raises(ValueError, match=r"var is .* in feature 1"):
        evaluate(stats)
