"""A step in several microbatches."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from train.config import RUNS, RunError
from train.parallel import AXIS, check_layout, parallelize, sharded
from train.step import first_state, make_train_step

BATCH = 16
WITH_BN = dataclasses.replace(RUNS["mnist_sigmoid_bn"], batch_size=BATCH)
WITHOUT_BN = dataclasses.replace(RUNS["mnist_sigmoid"], batch_size=BATCH)


def make_batch(masked=False):
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (BATCH, 28, 28, 1), np.uint8),
        "label": rng.integers(0, 10, BATCH, np.int32),
    }
    return {**batch, "mask": rng.random(BATCH) < 0.6} if masked else batch


@functools.cache
def initial_state(config):
    return jax.device_get(first_state(dataclasses.replace(config, accumulate=1)))


def step(config, batch, how="shard_map", num_devices=1, **changes):
    """The state after one step, and its metrics."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
    config = dataclasses.replace(config, **changes)
    function = make_train_step(config, AXIS, sum_gradients=how == "pmap")
    batch = jax.device_put(batch, sharded(mesh))
    state = jax.tree.map(jnp.asarray, initial_state(config))
    return jax.device_get(parallelize(function, mesh, how)(state, batch))


def test_without_bn_the_microbatches_add_up_to_the_batch():
    batch = make_batch(masked=True)
    whole, parts = (step(WITHOUT_BN, batch, accumulate=k) for k in (1, 4))
    chex.assert_trees_all_close(parts, whole, rtol=1e-5, atol=1e-6)


def layer_stats(state):
    return state.batch_stats["hidden_1_bn"]


def pooled(momentum, batch):
    """The first layer's running values, moved once to the moments of all rows."""
    kernel = np.float64(initial_state(WITH_BN).params["hidden_1"]["kernel"])
    x = (batch["image"].reshape(BATCH, -1) / 127.5 - 1) @ kernel
    x = x[batch["mask"]] if "mask" in batch else x
    keep = momentum
    return {
        "mean": (1 - keep) * x.mean(0),
        "var": keep + (1 - keep) * x.var(0, ddof=1),
    }


@pytest.mark.report(35)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_running_values_move_once_to_the_moments_of_all_parts(masked, num_devices):
    batch = make_batch(masked)
    state, _ = step(WITH_BN, batch, num_devices=num_devices, accumulate=2)
    expected = pooled(WITH_BN.bn_momentum, batch)
    chex.assert_trees_all_close(layer_stats(state), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_the_parts_do_not_depend_on_the_devices(how):
    batch = make_batch(masked=True)
    alone = step(WITH_BN, batch, accumulate=2)
    spread = step(WITH_BN, batch, how, num_devices=4, accumulate=2)
    chex.assert_trees_all_close(spread, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.report(35)
def test_each_part_is_normalized_by_itself():
    whole, parts = (step(WITH_BN, make_batch(), accumulate=k)[1] for k in (1, 8))
    assert abs(whole["loss"] - parts["loss"]) > 1e-3 * whole["loss"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 3}, "accumulate=3 must be a divisor of batch_size=16"),
        ({"accumulate": 0}, "accumulate=0 must be more than 0"),
        ({"accumulate": 16}, "batch_size=16 must be at least 32 with batch"),
    ],
)
def test_parts_that_cannot_be_are_an_error(changes, message):
    with pytest.raises(RunError, match=message):
        dataclasses.replace(WITH_BN, **changes)


def test_parts_must_divide_over_the_devices():
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    config = dataclasses.replace(WITH_BN, accumulate=8)
    with pytest.raises(RunError, match=r"accumulate=8\. Choose a multiple of 32"):
        check_layout(config, mesh)
