"""The derivative of batch normalization, to any order (bnjax.transform)."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import bnjax
from bnjax.functional import normalize_batch

MASK = np.array([1, 0, 1, 1, 1, 0, 1])
GAMMA, BETA = np.array([2.0, -0.5]), np.array([0.25, 1.0])


def normal(shape, mean=3.0, std=2.0, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(mean, std, shape)
    return values.astype(jnp.dtype(dtype))


def arguments(rows=7, dtype="float32"):
    x, gamma, beta = normal((rows, 2), dtype=dtype), GAMMA, BETA
    return tuple(jnp.asarray(v).astype(dtype) for v in (x, gamma, beta))


def layer(x, scale, bias, mask=None, epsilon=1e-5, **options):
    start = bnjax.BatchStats(jnp.full(2, 2.5), jnp.ones(2))
    return bnjax.batch_norm(
        x, start, scale=scale, bias=bias, mask=mask, epsilon=epsilon, **options
    )[0]


def cubes(x, scale, bias, mask=None, **options):
    return cost(layer(x, scale, bias, mask, **options))


def cost(y):
    """A loss that asks masked elements, where y is 0, for a gradient too."""
    return (y**3 + 2 * y).sum()


def direct(x, scale, bias, mask=None):
    """The definition, left to JAX to differentiate: no shift and no rule."""
    if mask is not None:
        x = x[np.flatnonzero(mask)]
    mean = x.mean(0, keepdims=True)
    var = jnp.square(x - mean).mean(0, keepdims=True)
    y = (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale[None] + bias[None]
    return cost(y)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [("float32", 5e-6), ("bfloat16", 2**-7), ("float16", 2**-10)]
)
def test_the_gradient_is_that_of_section_3(dtype, rtol):
    x, scale, bias = arguments(16)
    x = x.astype(dtype)
    dy = jnp.asarray(normal((16, 2), mean=0, seed=1), dtype)
    gradients = jax.jit(lambda *args: jax.vjp(layer, *args)[1](dy))(x, scale, bias)
    right = oracle.gradient(np.asarray(x), GAMMA, np.asarray(dy))
    chex.assert_type(list(gradients), [jnp.dtype(dtype), jnp.float32, jnp.float32])
    wide = tuple(g.astype(jnp.float32) for g in gradients)
    chex.assert_trees_all_close(wide, right, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("mask", "order"),
    [(None, 1), (MASK, 1), (None, 2), (MASK, 3)],
    ids=["all, first", "masked, first", "all, second", "masked, third"],
)
def test_derivatives_agree_with_finite_differences(mask, order):
    with jax.enable_x64(True):
        args = (*arguments(dtype="float64"), jnp.float64(0.3))
        function = functools.partial(_cubes_of_epsilon, mask=_array(mask))
        for _ in range(order - 1):
            function = _directional(function)
        assert_derivative_is_right(function, args)


def assert_derivative_is_right(function, args, step=1e-4):
    """Compares the derivative along one direction, in both modes, with differences."""
    direction = _direction(args)

    @jax.jit
    def found(args):
        up = function(*jax.tree.map(lambda a, t: a + step * t, args, direction))
        down = function(*jax.tree.map(lambda a, t: a - step * t, args, direction))
        gradient = jax.grad(function, argnums=tuple(range(len(args))))(*args)
        reverse = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))
        return _directional(function)(*args), reverse, (up - down) / (2 * step)

    forward, reverse, difference = found(args)
    # Off by step² times the third derivative over the first, which is 1e2 at most.
    np.testing.assert_allclose((forward, reverse), [difference] * 2, rtol=1e-6)


def _direction(args):
    """A tangent for each argument, the same in each call."""
    return jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype) + 1)
                        .reshape(a.shape), args)  # fmt: skip


def _directional(function):
    """The derivative along that direction, by forward mode."""
    return lambda *args: jax.jvp(function, args, _direction(args))[1]


def _cubes_of_epsilon(x, scale, bias, epsilon, mask):
    return cubes(x, scale, bias, mask, epsilon=epsilon)


def _array(mask):
    return None if mask is None else jnp.asarray(mask)


@pytest.mark.report(65)
def test_the_second_derivative_is_right_for_the_reported_shape():
    with jax.enable_x64(True):
        x = jnp.asarray(normal((2, 2, 2), dtype="float64"))
        weight = jnp.asarray(normal((2, 2, 2), seed=1, dtype="float64"))
        start = bnjax.init_batch_stats(2)

        def loss(x):
            y, _ = bnjax.batch_norm(x, start, epsilon=0.25, feature_axes=1)
            return (weight * y).sum()

        assert_derivative_is_right(loss, (x,))
        assert_derivative_is_right(_directional(loss), (x,))


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_the_hessian_is_that_of_the_definition(mask):
    with jax.enable_x64(True):
        args = arguments(dtype="float64")
        pair = (cubes, _array(mask)), (direct, mask)
        hessians = [
            jax.hessian(functools.partial(f, mask=m), (0, 1, 2)) for f, m in pair
        ]
        ours, right = jax.jit(lambda *args: [hessian(*args) for hessian in hessians])(
            *args
        )
        chex.assert_trees_all_close(ours, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["mean", "var"])
def test_moments_have_the_gradient_of_their_definition(name):
    with jax.enable_x64(True):
        x, weight = arguments(dtype="float64")[0], jnp.array([1.0, -3.0])

        def moment(x):
            moments = bnjax.batch_moments(x)
            return (weight * jnp.square(getattr(moments, name))).sum()

        assert_derivative_is_right(moment, (x,))
        assert_derivative_is_right(_directional(moment), (x,))


def test_a_loss_of_result_and_moments_has_the_right_gradient():
    with jax.enable_x64(True):
        x, weight = arguments(dtype="float64")[0], jnp.array([1.0, -3.0])

        def loss(x):
            start = bnjax.BatchStats(jnp.array([2.5, 90.0]), jnp.ones(2))
            y, moments = normalize_batch(x, start)
            return cost(y) + (weight * moments.mean**2 + moments.var**2).sum()

        assert_derivative_is_right(loss, (x,))


def test_linearize_is_the_jvp_and_vjp_its_transpose():
    with jax.enable_x64(True):
        args, tangents = arguments(dtype="float64"), arguments(dtype="float64")
        y, tangent = jax.jvp(jax.jit(layer), args, tangents)
        _, linear = jax.linearize(jax.jit(layer), *args)
        chex.assert_trees_all_close(linear(*tangents), tangent, rtol=1e-12)
        cotangents = jax.vjp(jax.jit(layer), *args)[1](y)
        products = jax.tree.map(jnp.vdot, cotangents, tangents)
        np.testing.assert_allclose(sum(products), jnp.vdot(y, tangent), rtol=1e-12)


def test_vmap_of_grad_equals_a_loop():
    stacked = tuple(jnp.stack([a, a + 1, a * 2]) for a in arguments())
    together = jax.jit(jax.vmap(jax.grad(cubes, argnums=(0, 1, 2))))(*stacked)
    one = jax.jit(jax.grad(cubes, argnums=(0, 1, 2)))
    alone = [one(*(a[i] for a in stacked)) for i in (0, 1, 2)]
    right = jax.tree.map(lambda *parts: jnp.stack(parts), *alone)
    chex.assert_trees_all_close(together, right, rtol=1e-5, atol=1e-4)


def test_gradients_are_the_same_under_remat():
    args = arguments()
    wrapped = jax.jit(jax.grad(jax.checkpoint(cubes), argnums=(0, 1, 2)))(*args)
    plain = jax.jit(jax.grad(cubes, argnums=(0, 1, 2)))(*args)
    chex.assert_trees_all_close(wrapped, plain, rtol=1e-5, atol=1e-5)


def test_the_layer_works_in_a_scan_that_carries_its_running_values():
    batches = jnp.asarray(normal((3, 7, 2)))

    def body(stats, x):
        y, stats = bnjax.batch_norm(x, stats, momentum=0.5)
        return stats, cost(y)

    def loss(batches):
        stats, losses = jax.lax.scan(body, bnjax.init_batch_stats(2), batches)
        return losses.sum(), stats

    gradient, stats = jax.jit(jax.grad(loss, has_aux=True))(batches)
    unit = jnp.ones(2), jnp.zeros(2)
    one = jax.jit(jax.grad(lambda x: direct(x, *unit)))
    right = jnp.stack([one(x) for x in batches])
    np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-5)
    mean = oracle.wide(batches).mean(1)
    np.testing.assert_allclose(stats.mean, mean.T @ [0.125, 0.25, 0.5], rtol=1e-6)


@pytest.mark.report(6)
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
@pytest.mark.parametrize("second", [False, True], ids=["gradient", "second order"])
def test_what_the_mask_hides_reaches_no_derivative(second, poison):
    x, scale, bias = arguments()
    valid, direction = np.flatnonzero(MASK), jnp.asarray(normal((7, 2), seed=3))
    hidden = jnp.where(MASK[:, None], x, poison)

    def derivative(x, direction, mask):
        def function(x, scale, bias):
            along = jax.jvp(lambda x: cubes(x, scale, bias, mask), (x,), (direction,))
            return along[second]

        return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(x, scale, bias)

    value, (dx, *rest) = derivative(hidden, direction, jnp.asarray(MASK))
    right, (right_dx, *others) = derivative(x[valid], direction[valid], None)
    assert not dx[MASK == 0].any()
    chex.assert_trees_all_close(
        (value, dx[valid], rest), (right, right_dx, others), rtol=2e-5, atol=1e-4
    )


def test_what_the_mask_hides_reaches_no_gradient_of_evaluation():
    x, scale, bias = arguments()
    evaluate = functools.partial(cubes, use_running_average=True)
    gradient = jax.jit(jax.grad(evaluate, argnums=(0, 1, 2)))
    hidden = jnp.where(MASK[:, None], x, jnp.nan)
    dx, *rest = gradient(hidden, scale, bias, jnp.asarray(MASK))
    right_dx, *right = gradient(x[np.flatnonzero(MASK)], scale, bias)
    assert not dx[MASK == 0].any()
    chex.assert_trees_all_close((dx[MASK > 0], rest), (right_dx, right), rtol=1e-5)


def test_a_poisoned_tangent_behind_the_mask_reaches_nothing():
    x, scale, bias = arguments()
    tangent = jnp.where(MASK[:, None], jnp.ones_like(x), jnp.nan)
    hidden = functools.partial(cubes, scale=scale, bias=bias, mask=jnp.asarray(MASK))
    assert np.isfinite(jax.jvp(jax.jit(hidden), (x,), (tangent,))[1])


def test_a_poisoned_scale_of_a_masked_example_reaches_nothing():
    x, _, _ = arguments()
    scale = jnp.where(MASK[:, None], jnp.asarray(normal((7, 2))), jnp.nan)
    gradient = jax.jit(jax.grad(cubes, argnums=(0, 1)))
    found = gradient(x, scale, scale, jnp.asarray(MASK))
    clean = jnp.where(MASK[:, None], scale, 0.0)
    chex.assert_trees_all_equal(found, gradient(x, clean, clean, jnp.asarray(MASK)))


@pytest.mark.parametrize("rows", [0, 4], ids=["no examples", "all masked"])
def test_gradients_are_zero_where_nothing_counts(rows):
    x, scale, bias = arguments(rows)
    gradient = jax.jit(jax.grad(cubes, argnums=(0, 1, 2)))
    found = gradient(x * jnp.nan, scale, bias, jnp.zeros(rows))
    chex.assert_trees_all_equal(found, jax.tree.map(jnp.zeros_like, (x, scale, bias)))


def test_gradients_of_a_single_valid_element_are_finite_and_zero_for_x():
    x, scale, bias = arguments(4)
    mask = jnp.array([0, 0, 1, 0])
    dx, _, dbias = jax.jit(jax.grad(cubes, argnums=(0, 1, 2)))(x, scale, bias, mask)
    np.testing.assert_array_equal(dx, np.zeros((4, 2)))
    np.testing.assert_allclose(dbias, 3 * BETA**2 + 2, rtol=1e-6)


def test_the_gradient_of_complex_input_agrees_with_finite_differences():
    with jax.enable_x64(True):
        real = (
            normal((6, 2), dtype="float64"),
            normal((6, 2), seed=1, dtype="float64"),
        )
        scale = jnp.asarray(GAMMA + 1j * BETA)

        def loss(re, im):
            y = layer(jax.lax.complex(re, im), scale, None)
            return (y.real**3 + y.imag * y.real**2).sum()

        args = tuple(jnp.asarray(v) for v in real)
        assert_derivative_is_right(loss, args)
        assert_derivative_is_right(_directional(loss), args)
