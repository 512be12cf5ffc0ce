"""What users of other libraries reported about layers, in models of Flax."""

import functools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import bnjax
import bnjax.nnx
from bnjax.linen import BatchNorm

KEY = jax.random.key(0)


def normal(shape=(8, 3), seed=0):
    values = np.random.default_rng(seed).normal(3.0, 2.0, shape)
    return jnp.asarray(values, jnp.float32)


HALF = [
    ("float16", 3000.7, 1e5, 3316, 0.99707),
    ("bfloat16", 1001, 1, 1002, 1.0),
]


@pytest.mark.report(12)
@pytest.mark.parametrize(("dtype", "mean", "var", "x", "right"), HALF)
def test_evaluation_in_half_precision_keeps_the_signal(dtype, mean, var, x, right):
    module = BatchNorm(use_running_average=True, dtype=jnp.dtype(dtype), epsilon=0.0)
    stats = {"mean": jnp.full(1, mean), "var": jnp.full(1, var)}
    params = {"scale": jnp.ones(1), "bias": jnp.zeros(1)}
    tree = {"params": params, "batch_stats": jax.tree.map(jnp.float32, stats)}
    y = module.apply(tree, jnp.full((1, 1), x, jnp.float32))
    np.testing.assert_allclose(y.astype(jnp.float32), [[right]], rtol=2**-8)


@pytest.mark.report(31)
def test_evaluation_without_running_values_is_an_error_that_names_them():
    module, x = BatchNorm(use_running_average=True), normal()
    params = module.init(KEY, x)["params"]
    with pytest.raises(flax.errors.ScopeCollectionNotFound, match="batch_stats"):
        module.apply({"params": params}, x)


class Net(nn.Module):
    """Two normalized layers; each can be frozen in either way."""

    frozen: tuple[str, ...] = ()  # running values normalize, in training too
    still: tuple[str, ...] = ()  # running values do not move

    @nn.compact
    def __call__(self, x, train):
        for name in ("backbone", "head"):
            layer = BatchNorm(update_stats=name not in self.still, name=name)
            x = layer(nn.Dense(4)(x), name in self.frozen or not train)
        return x


def ten_steps(model, variables):
    """The variables after ten steps of a learning rate of 0."""
    optimizer = optax.sgd(0.0)

    def step(variables, x):
        def loss(params):
            tree = {**variables, "params": params}
            y, new = model.apply(tree, x, True, mutable=["batch_stats"])
            return (y**3).sum(), new

        gradient, new = jax.grad(loss, has_aux=True)(variables["params"])
        updates, _ = optimizer.update(gradient, optimizer.init(variables["params"]))
        return {"params": optax.apply_updates(variables["params"], updates), **new}, ()

    return jax.jit(functools.partial(jax.lax.scan, step))(variables, normal((10, 8, 3)))


@pytest.mark.report(33)
@pytest.mark.parametrize("how", ["frozen", "still"])
def test_ten_steps_change_no_bit_of_what_a_frozen_network_evaluates_to(how):
    model, x = Net(**{how: ("backbone", "head")}), normal()
    variables = jax.jit(model.init, static_argnums=2)(KEY, x, False)
    after, _ = ten_steps(model, variables)
    evaluate = jax.jit(lambda variables: model.apply(variables, x, False))
    np.testing.assert_array_equal(evaluate(after), evaluate(variables))


@pytest.mark.report(34)
@pytest.mark.parametrize("how", ["frozen", "still"])
def test_a_backbone_may_be_frozen_below_a_head_that_learns(how):
    model, x = Net(**{how: ("backbone",)}), normal()
    variables = jax.jit(model.init, static_argnums=2)(KEY, x, False)
    end, _ = ten_steps(model, variables)
    start, end = (tree["batch_stats"] for tree in (variables, end))
    chex.assert_trees_all_equal(end["backbone"], start["backbone"])
    assert (end["head"]["mean"] != start["head"]["mean"]).all()


@pytest.mark.report(60)
def test_an_nnx_layer_for_another_number_of_features_is_an_error_that_says_so():
    layer = bnjax.nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"has shape \(5,\), but x of shape \(8, 3\)"):
        layer(normal())


@pytest.mark.report(45, 63)
def test_init_on_threes_leaves_0_and_1():
    module = BatchNorm(use_running_average=False)
    stats = module.init(KEY, 3 * jnp.ones((4, 1)))["batch_stats"]
    assert (stats["mean"].tolist(), stats["var"].tolist()) == ([0.0], [1.0])


@pytest.mark.report(64)
def test_new_running_values_of_a_layer_have_no_gradient():
    module, x = BatchNorm(use_running_average=False), normal()
    variables = module.init(KEY, x)

    def drift(x):
        _, new = module.apply(variables, x, mutable=["batch_stats"])
        return sum(value.sum() for value in jax.tree.leaves(new))

    assert not jax.jit(jax.grad(drift))(x).any()


@pytest.mark.report(67)
def test_an_ensemble_under_vmap_equals_a_loop():
    module, x = BatchNorm(use_running_average=False), normal()
    members = [
        jax.tree.map(lambda v, k=k: v + 0.5 * k, module.init(KEY, x)) for k in range(3)
    ]
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *members)
    apply = functools.partial(module.apply, mutable=["batch_stats"])
    found = jax.jit(jax.vmap(apply, (0, None)))(stacked, x)
    alone = [jax.jit(apply)(member, x) for member in members]
    right = jax.tree.map(lambda *values: jnp.stack(values), *alone)
    chex.assert_trees_all_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.report(68)
def test_variables_are_plain_dicts_with_the_names_of_flax():
    variables = BatchNorm(use_running_average=False).init(KEY, normal())
    shapes = jax.tree.map(jnp.shape, variables)
    each = (3,)
    assert shapes == {
        "params": {"scale": each, "bias": each},
        "batch_stats": {"mean": each, "var": each},
    }


@pytest.mark.report(68)
def test_a_checkpoint_of_flax_evaluates_alike():
    x = normal()
    theirs = nn.BatchNorm(use_running_average=False)
    with jax.numpy_dtype_promotion("standard"):  # Flax's own code asks for it
        variables = theirs.init(KEY, x)
        _, new = theirs.apply(variables, x, mutable=["batch_stats"])
        variables = {**variables, **new}
        right = theirs.clone(use_running_average=True).apply(variables, x)
    y = BatchNorm(use_running_average=True).apply(variables, x)
    np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)
