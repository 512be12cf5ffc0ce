"""What an optimizer may touch, and what an L2 penalty may shrink."""

import chex
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


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return BatchNorm(use_running_average=True)(nn.Dense(3)(x))


RIGHT = {
    "BatchNorm_0": {"bias": False, "scale": False},
    "Dense_0": {"bias": False, "kernel": True},
}


def params_of(module):
    return jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, 3)))["params"]


@pytest.mark.report(37)
def test_kernels_alone_decay():
    assert bnjax.weight_decay_mask(params_of(Block())) == RIGHT


@pytest.mark.report(37)
@pytest.mark.parametrize("stack", ["vmap", "scan"])
def test_parameters_that_are_stacked_are_told_apart_by_name(stack):
    axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True}
    if stack == "vmap":
        stacked = nn.vmap(Block, variable_axes=axes, split_rngs=rngs, axis_size=4)
        variables = jax.eval_shape(
            stacked().init, jax.random.key(0), jnp.ones((4, 2, 3))
        )
    else:
        body = nn.scan(Carried, variable_axes=axes, split_rngs=rngs, length=4)
        variables = jax.eval_shape(body().init, jax.random.key(0), jnp.ones((2, 3)))
    assert bnjax.weight_decay_mask(variables["params"]) == RIGHT


class Carried(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3, name="Dense_0")(x)
        return BatchNorm(use_running_average=True, name="BatchNorm_0")(x), None


def test_names_count_at_the_end_of_a_path_only():
    params = {"scale": {"kernel": 1.0}, "bias_net": [{"bias": 1.0}, {"w": 1.0}]}
    right = {"scale": {"kernel": True}, "bias_net": [{"bias": False}, {"w": True}]}
    assert bnjax.weight_decay_mask(params) == right


def test_partitioned_parameters_keep_their_names():
    params = {"scale": nn.Partitioned(1.0, ("i",)), "kernel": nn.Partitioned(1.0, ())}
    mask = bnjax.weight_decay_mask(params)
    assert jax.tree.leaves(mask) == [True, False]


def test_an_nnx_state_is_understood():
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    state = nnx.state([norm, layer], nnx.Param)
    mask = bnjax.weight_decay_mask(state)
    leaves = jax.tree_util.tree_leaves_with_path(mask)
    right = [value for path, value in leaves if "kernel" in jax.tree_util.keystr(path)]
    assert (right, sum(value for _, value in leaves), len(leaves)) == ([True], 1, 4)


def test_a_parameter_without_a_name_decays():
    assert bnjax.weight_decay_mask(1.0) is True
    assert bnjax.weight_decay_mask([1.0, (2.0,)]) == [True, (True,)]


def test_decay_by_optax_leaves_scale_and_bias_alone():
    params = {"bn": {"scale": jnp.ones(2), "bias": jnp.ones(2)}, "w": jnp.ones(2)}
    rule = optax.add_decayed_weights(0.1, mask=bnjax.weight_decay_mask)
    zero, state = jax.tree.map(jnp.zeros_like, params), rule.init(params)
    updates, _ = rule.update(zero, state, params)
    chex.assert_trees_all_equal(updates["bn"], zero["bn"])
    np.testing.assert_allclose(updates["w"], [0.1, 0.1], rtol=1e-6)


def linen_variables():
    return jax.eval_shape(Block().init, jax.random.key(0), jnp.ones((2, 3)))


def nnx_model():
    return nnx.Sequential(
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)), bnjax.nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    )


WRONG = {
    "all Linen variables": linen_variables,
    "the collection of statistics": lambda: linen_variables()["batch_stats"],
    "an NNX model": nnx_model,
    "the whole NNX state": lambda: nnx.state(nnx_model()),
    "the NNX state as plain dicts": lambda: nnx.to_pure_dict(nnx.state(nnx_model())),
}


@pytest.mark.report(37)
@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_running_statistics_are_nothing_for_an_optimizer(make):
    with pytest.raises(ValueError, match=r"given running statistics: .*mean"):
        bnjax.check_optimizer_tree(make())


RIGHTFUL = {
    "Linen parameters": lambda: linen_variables()["params"],
    "NNX parameters": lambda: nnx.state(nnx_model(), nnx.Param),
    "layers that are called mean and var": lambda: {
        "mean": {"kernel": 1.0},
        "var": {"kernel": 1.0},
    },
    "a mean and a var among others": lambda: {"mean": 1.0, "var": 1.0, "kernel": 1.0},
    "a single array": lambda: jnp.ones(3),
}


@pytest.mark.parametrize("make", RIGHTFUL.values(), ids=RIGHTFUL)
def test_parameters_are_for_an_optimizer(make):
    bnjax.check_optimizer_tree(make())
