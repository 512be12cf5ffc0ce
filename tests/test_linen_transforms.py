"""The Linen module inside of Flax's transforms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from bnjax.linen import BatchNorm


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).normal(3.0, 2.0, shape)
    return jnp.asarray(values, jnp.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False)(x)
        return nn.relu(BatchNorm(use_running_average=False)(x))


class Carried(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Block(name="block")(x), None


STACKED = {"variable_axes": {"params": 0, "batch_stats": 0}}
STACKED |= {"split_rngs": {"params": True}}


def train(module, variables, x):
    return module.apply(variables, x, mutable=["batch_stats"])


def layer(variables, index):
    return jax.tree.map(lambda leaf: leaf[index], variables)


@pytest.mark.report(67)
def test_vmap_over_networks_keeps_their_statistics_apart():
    ensemble = nn.vmap(Block, in_axes=0, axis_size=3, **STACKED)()
    x = normal(3, 8, 4)
    variables = ensemble.init(jax.random.key(0), x)
    y, new = train(ensemble, variables, x)
    for index in range(3):
        one = train(Block(), layer(variables, index), x[index])
        chex.assert_trees_all_close((y[index], layer(new, index)), one, rtol=1e-5)


def test_a_scan_over_layers_gives_each_its_statistics():
    stack = nn.scan(Carried, length=3, **STACKED)()
    x = normal(8, 4)
    variables = stack.init(jax.random.key(0), x)
    (y, _), new = train(stack, variables, x)
    for index in range(3):
        (x, _), one = train(Carried(), layer(variables, index), x)
        chex.assert_trees_all_close(layer(new, index), one, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(y, x, rtol=1e-4, atol=1e-5)


class Stream(nn.Module):
    """One layer for chunk after chunk; its variables exist before they are carried."""

    @nn.compact
    def __call__(self, chunks):
        block = Block(name="block")
        if self.is_initializing():
            return block(chunks[0])
        scan = nn.scan(
            lambda block, carry, chunk: (carry, block(chunk)),
            variable_broadcast="params",
            variable_carry="batch_stats",
            split_rngs={"params": False},
        )
        return scan(block, (), chunks)[1]


@pytest.mark.report(49)
def test_carried_statistics_move_with_each_chunk():
    chunks = normal(3, 8, 4)
    variables = Stream().init(jax.random.key(0), chunks)
    y, new = train(Stream(), variables, chunks)
    one = {name: tree["block"] for name, tree in variables.items()}
    for index in range(3):
        expected, moved = train(Block(), one, chunks[index])
        np.testing.assert_allclose(y[index], expected, rtol=1e-5, atol=1e-6)
        one = {**one, **moved}
    chex.assert_trees_all_close(
        new["batch_stats"]["block"], one["batch_stats"], rtol=1e-5
    )


@pytest.mark.report(51)
def test_vmap_with_an_axis_name_pools_over_it():
    module = BatchNorm(use_running_average=False, axis_name="i")
    mapped = nn.vmap(
        lambda module, x: module(x),
        axis_name="i",
        variable_axes={"params": None, "batch_stats": None},
        split_rngs={"params": False},
    )

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return mapped(module.copy(name="bn"), x)

    x = normal(2, 4, 3) + jnp.array([0.0, 10.0])[:, None, None]
    variables = Both().init(jax.random.key(0), x)
    y, new = train(Both(), variables, x)
    whole = BatchNorm(use_running_average=False)
    inner = {name: tree["bn"] for name, tree in variables.items()}
    right, moved = train(whole, inner, x.reshape(8, 3))
    np.testing.assert_allclose(y.reshape(8, 3), right, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(
        new["batch_stats"]["bn"], moved["batch_stats"], rtol=1e-5
    )
