"""What users of other libraries reported: running values, and evaluation with them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import bnjax
from bnjax.linen import BatchNorm

KEY = jax.random.key(0)


def normal(mean, std, shape=(1000, 1), seed=0):
    values = np.random.default_rng(seed).normal(mean, std, shape)
    return jnp.asarray(values, jnp.float32)


def training(module, variables, batches):
    """The variables after one step on each batch, compiled."""

    def step(stats, x):
        tree = {**variables, "batch_stats": stats}
        _, new = module.apply(tree, x, False, mutable=["batch_stats"])
        return new["batch_stats"], None

    scan = jax.jit(functools.partial(jax.lax.scan, step))
    return {**variables, "batch_stats": scan(variables["batch_stats"], batches)[0]}


@pytest.mark.report(7)
def test_ten_steps_hand_on_what_evaluation_needs():
    batches, module = normal(5.0, 2.0, (11, 1000, 1)), BatchNorm(momentum=0.5)
    variables = training(module, module.init(KEY, batches[0], False), batches[:10])
    y = module.apply(variables, batches[10], True)
    # What is left of 0 and 1 is 0.5¹⁰ of them; the rest is noise of 1000 draws.
    np.testing.assert_allclose((y.mean(), y.std()), (0, 1), atol=0.1)


@pytest.mark.report(9)
@pytest.mark.parametrize(("unbiased", "var"), [(True, 1.0), (False, 0.5)])
def test_batches_of_two_end_at_the_variance_that_was_asked_for(unbiased, var):
    def step(stats, x):
        options = {"momentum": 0.999, "unbiased": unbiased}
        return bnjax.batch_norm(x, stats, **options)[1], None

    batches = normal(0.0, 1.0, (8000, 2, 3))
    scan = jax.jit(functools.partial(jax.lax.scan, step))
    stats, _ = scan(bnjax.init_batch_stats(3), batches)
    # An average over 2000 variances that deviate by √2 each: three errors.
    np.testing.assert_allclose(stats.var, np.full(3, var), rtol=0.095)


@pytest.mark.report(10)
def test_a_momentum_of_nine_tenths_keeps_nine_tenths():
    x = jnp.array([[9.0], [11.0]])
    _, stats = bnjax.batch_norm(x, bnjax.init_batch_stats(1), momentum=0.9)
    np.testing.assert_allclose(stats.mean, [1.0], rtol=1e-6)


@pytest.mark.report(10)
def test_a_momentum_that_would_extrapolate_is_an_error_of_the_module():
    with pytest.raises(ValueError, match=r"momentum=1.9 .* must lie in \[0, 1\]"):
        BatchNorm(momentum=1.9).init(KEY, jnp.ones((2, 1)), False)


@pytest.mark.report(13)
def test_a_slow_average_arrives_beside_a_network_in_bfloat16():
    module = BatchNorm(momentum=0.99, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    ones = jnp.ones((2000, 4, 1), jnp.bfloat16)
    variables = training(module, module.init(KEY, ones[0], False), ones)
    chex.assert_type(jax.tree.leaves(variables["batch_stats"]), jnp.float32)
    np.testing.assert_allclose(variables["batch_stats"]["mean"], [1.0], rtol=1e-5)


@pytest.mark.report(34)
def test_running_values_may_normalize_and_move():
    x, stats = normal(10.0, 3.0), bnjax.init_batch_stats(1)
    y = bnjax.normalize(x, *stats)
    new = bnjax.update_batch_stats(stats, bnjax.batch_moments(x))
    right, _ = bnjax.batch_norm(x, stats, use_running_average=True)
    _, moved = bnjax.batch_norm(x, stats)
    np.testing.assert_array_equal(y, right)
    chex.assert_trees_all_close(new, moved, rtol=1e-6)


MICROBATCHES = jnp.array([[0.0, 4], [1, 3], [10, 14], [-2, 6]])[..., None]


@pytest.mark.report(35)
@pytest.mark.parametrize(("unbiased", "var"), [(True, 3.75714), (False, 3.4)])
def test_four_microbatches_move_the_running_values_once(unbiased, var):
    module = BatchNorm(momentum=0.9, unbiased=unbiased)
    variables = module.init(KEY, MICROBATCHES[0], False)
    pooling = bnjax.start_pooling(variables["batch_stats"])
    variables = training(module, {**variables, "batch_stats": pooling}, MICROBATCHES)
    stats = bnjax.finish_pooling(variables["batch_stats"])
    chex.assert_trees_all_close(
        stats, {"mean": np.array([0.45]), "var": np.array([var])}, rtol=1e-5
    )


@pytest.mark.report(36)
def test_a_rematerialized_call_moves_the_running_values_once():
    x = normal(10.0, 1.0)

    @jax.checkpoint
    def loss(x):
        y, new = bnjax.batch_norm(x, bnjax.init_batch_stats(1), momentum=0.9)
        return (y**3).sum(), new

    _, new = jax.jit(jax.grad(loss, has_aux=True))(x)
    np.testing.assert_allclose(new.mean, 0.1 * x.mean(0), rtol=1e-5)


@pytest.mark.report(44, 46)
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize(("mean", "std"), [(5, 2), (0, 10)])
def test_debiased_values_evaluate_to_unit_deviation_from_the_first_step(
    steps, mean, std
):
    module, batches = BatchNorm(momentum=0.99, debias=True), normal(mean, std)[None]
    variables = module.init(KEY, batches[0], False)
    variables = training(module, variables, jnp.tile(batches, (steps, 1, 1)))
    y = module.apply(variables, batches[0], True)
    # The variance of the population is 1000/999 of that of the batch.
    np.testing.assert_allclose((y.mean(), y.std()), (0, 0.9995), atol=1e-4)


@pytest.mark.report(44, 45)
@pytest.mark.parametrize("debias", [False, True])
def test_before_any_step_evaluation_is_the_identity(debias):
    x, module = normal(3.0, 2.0), BatchNorm(debias=debias)
    variables = module.init(KEY, x, False)
    y = module.apply(variables, x, True)
    # 1 / √(1 + ε)
    np.testing.assert_allclose(y, x * 0.999995, rtol=1e-6)


class Siamese(nn.Module):
    """One layer that is called twice a step."""

    @nn.compact
    def __call__(self, a, b):
        layer = BatchNorm(use_running_average=False, momentum=0.9, name="bn")
        return layer(a), layer(b)


@pytest.mark.report(59)
@pytest.mark.parametrize(("means", "right"), [((0, 10), 1.0), ((10, 0), 0.9)])
def test_two_calls_of_one_layer_move_the_running_mean_twice(means, right):
    a, b = (mean + jnp.array([[-1.0], [1.0]]) for mean in means)
    variables = Siamese().init(KEY, a, b)
    _, new = Siamese().apply(variables, a, b, mutable=["batch_stats"])
    np.testing.assert_allclose(new["batch_stats"]["bn"]["mean"], [right], rtol=1e-6)


@pytest.mark.report(59)
def test_two_calls_of_the_function_move_the_running_mean_twice():
    stats = bnjax.init_batch_stats(1)
    for mean in (0, 10):
        x = mean + jnp.array([[-1.0], [1.0]])
        _, stats = bnjax.batch_norm(x, stats, momentum=0.9)
    np.testing.assert_allclose(stats.mean, [1.0], rtol=1e-6)
