"""Statements of the paper, as properties of the code."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import bnjax

batch_norm = jax.jit(bnjax.batch_norm)
batch_moments = jax.jit(bnjax.batch_moments)
normalize = jax.jit(bnjax.normalize)
START = bnjax.init_batch_stats(3)
# The statements hold as ε → 0.
EPSILON = 1e-12


def normal(shape, mean=0.0, std=1.0, seed=0):
    values = np.random.default_rng(seed).normal(mean, std, shape)
    return jnp.asarray(values, jnp.float32)


def loss(weight, u):
    """ℓ(BN(Wu)) of Section 3.3, with an ℓ that is no sum of squares."""
    y, _ = batch_norm(u @ weight, START, epsilon=EPSILON)
    return (normal(y.shape, seed=9) * jnp.tanh(y)).sum()


def layers():
    return normal((4, 3), seed=1), normal((8, 4), seed=2)


SCALES = pytest.mark.parametrize("a", [0.01, 1.0, 300.0])


@SCALES
def test_the_result_does_not_depend_on_the_scale_of_the_weights(a):
    weight, u = layers()
    y, _ = batch_norm(u @ weight, START, epsilon=EPSILON)
    scaled, _ = batch_norm(u @ (a * weight), START, epsilon=EPSILON)
    np.testing.assert_allclose(scaled, y, rtol=1e-5, atol=1e-6)


@SCALES
def test_the_jacobian_does_not_depend_on_the_scale_of_the_weights(a):
    weight, u = layers()
    du = jax.jit(jax.grad(loss, argnums=1))
    np.testing.assert_allclose(du(a * weight, u), du(weight, u), rtol=1e-4, atol=1e-5)


@SCALES
def test_larger_weights_get_smaller_gradients(a):
    weight, u = layers()
    dw = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(
        dw(a * weight, u) * a, dw(weight, u), rtol=1e-4, atol=1e-5
    )


def test_gradients_are_orthogonal_to_the_weights_of_a_unit():
    weight, u = layers()
    along = (weight * jax.jit(jax.grad(loss))(weight, u)).sum(0)
    np.testing.assert_allclose(along, np.zeros(3), atol=2e-5)


def test_the_transform_can_represent_the_identity():
    x = normal((16, 3), mean=2.0, std=3.0)
    moments = batch_moments(x)
    scale = jnp.sqrt(moments.var + 1e-5)
    y, _ = batch_norm(x, START, scale=scale, bias=moments.mean)
    np.testing.assert_allclose(y, x, rtol=1e-6, atol=2e-6)


def test_the_normalized_batch_has_mean_0_and_variance_1():
    y, _ = batch_norm(normal((64, 3), mean=5.0, std=3.0), START, epsilon=EPSILON)
    moments = batch_moments(y)
    np.testing.assert_allclose(moments.mean, np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(moments.var, np.ones(3), rtol=1e-6)


def test_a_bias_before_the_transform_has_no_effect():
    x = normal((8, 3))
    biased, _ = batch_norm(x + jnp.array([[1.0, -2.0, 4.0]]), START)
    np.testing.assert_allclose(biased, batch_norm(x, START)[0], atol=2e-6)


def descend(centre, steps=100, rate=0.1):
    """Gradient descent on b in x̂ = u + b − E[u + b]; returns b and the losses."""
    u, target = normal((16, 1)), normal((16, 1), mean=1.0, seed=1)

    def loss(b):
        return jnp.square(centre(u + b) - target).mean()

    def step(b, _):
        value, gradient = jax.value_and_grad(loss)(b)
        return b - rate * gradient, value

    return jax.jit(lambda: jax.lax.scan(step, jnp.float32(0), length=steps))()


@pytest.mark.report(47)
def test_a_bias_explodes_when_the_gradient_ignores_the_mean():
    b, losses = descend(lambda x: x - jax.lax.stop_gradient(x.mean()))
    # Each step adds 2 · rate · E[target]: it never comes to rest.
    assert b > 15
    np.testing.assert_allclose(losses, np.full(100, losses[0]), rtol=1e-5)


@pytest.mark.report(47)
def test_a_bias_stays_where_it_is_under_the_gradient_of_the_transform():
    b, _ = descend(lambda x: batch_norm(x, bnjax.init_batch_stats(1))[0])
    np.testing.assert_allclose(b, 0, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_inference_is_one_affine_map(epsilon):
    x = normal((8, 3), mean=1.0)
    stats = bnjax.BatchStats(jnp.array([1.0, 0.0, -2.0]), jnp.array([4.0, 1.0, 0.1]))
    options = {"scale": jnp.array([2.0, -1.0, 0.5]), "bias": jnp.array([0.0, 1.0, 2.0])}
    multiplier, offset = bnjax.inference_affine(stats, epsilon=epsilon, **options)
    y = normalize(x, *stats, epsilon=epsilon, **options)
    np.testing.assert_allclose(x * multiplier[None] + offset[None], y, atol=5e-6)


def test_inference_folds_into_the_layer_before():
    weight, u = layers()
    stats = bnjax.BatchStats(jnp.array([1.0, 0.0, -2.0]), jnp.array([4.0, 1.0, 0.1]))
    multiplier, offset = bnjax.inference_affine(stats)
    folded = u @ (weight * multiplier[None]) + offset[None]
    np.testing.assert_allclose(normalize(u @ weight, *stats), folded, atol=1e-5)


def test_the_average_of_batches_is_the_population_of_algorithm_2():
    batches = [np.asarray(normal((5, 3), mean=k, seed=k)) for k in range(4)]
    stats = START
    for k, batch in enumerate(batches):
        # The k-th of a cumulative average weighs what was by k/(k+1).
        momentum = k / (k + 1)
        stats = batch_norm(jnp.asarray(batch), stats, momentum=momentum)[1]
    chex.assert_trees_all_close(tuple(stats), oracle.population(batches), rtol=2e-6)


@pytest.mark.report(9)
def test_small_batches_estimate_the_variance_without_bias():
    batches = normal((2000, 2, 3))
    update = jax.vmap(lambda x: batch_norm(x, START, momentum=0.0)[1])
    mean, var = jax.jit(update)(batches)
    # 2000 estimates of a deviation of √2 each: three standard errors are 0.095.
    np.testing.assert_allclose(var.mean(0), np.ones(3), atol=0.095)
    np.testing.assert_allclose(mean.mean(0), np.zeros(3), atol=0.05)


def test_a_feature_map_shares_one_mean_and_variance():
    x = np.asarray(normal((2, 3, 4, 3), mean=1.0))
    y, _ = batch_norm(jnp.asarray(x), START)
    flat, unit = x.reshape(24, 3), np.ones(3)
    right = oracle.batch_norm(flat, unit, 0 * unit).reshape(x.shape)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-6)
