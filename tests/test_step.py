import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from train import step
from train.config import RUNS
from train.parallel import AXIS, check_layout, parallelize, sharded
from train.step import (
    image_shape,
    init_state,
    make_model,
    make_optimizer,
    make_train_step,
    metrics_of,
)

BATCH = 16
DIGITS = dataclasses.replace(RUNS["mnist_sigmoid_bn"], batch_size=BATCH)
# Mirrored and shifted at random, which must not depend on the devices either.
PICTURES = dataclasses.replace(
    DIGITS,
    dataset="cifar10",
    sgd_momentum=0.9,
    weight_decay=1e-3,
    decay_rate=0.5,
    decay_steps=2,
)


def make_batch(config, seed=0):
    """Of four devices the last has a single row that counts, row 12."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (BATCH, *image_shape(config)), np.uint8)
    mask = np.arange(BATCH) < BATCH - 3
    return {
        "image": images,
        "label": rng.integers(0, 10, BATCH).astype(np.int32),
        "mask": mask & (np.arange(BATCH) != 5),
    }


@functools.cache
def make_step(config, how="shard_map", num_devices=2):
    """One compiled step for all tests; it keeps the state that it is given."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
    step = make_train_step(config, AXIS, sum_gradients=how == "pmap")
    mapped = parallelize(step, mesh, how)

    def run(state, batch):
        batch = jax.device_put(batch, sharded(mesh))
        state, metrics = mapped(jax.tree.map(jnp.copy, state), batch)
        return jax.device_get((state, metrics))

    return run


first_state = functools.cache(step.first_state)


@functools.cache
def train_three_steps(how, num_devices):
    state, history = first_state(PICTURES), []
    for seed in range(3):
        batch = make_batch(PICTURES, seed)
        state, metrics = make_step(PICTURES, how, num_devices)(state, batch)
        history.append(metrics)
    return state, history


def assert_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected
    )


@pytest.mark.parametrize(("how", "num_devices"), [("shard_map", 4), ("pmap", 4)])
def test_a_step_gives_the_same_on_any_devices(how, num_devices):
    alone, history = train_three_steps("shard_map", 1)
    state, metrics = train_three_steps(how, num_devices)
    assert_close(metrics, history, rtol=2e-6)
    # Sums in another order: a few units of 6e-8 of values up to 1.
    assert_close(state, alone, rtol=1e-5, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def plain_step(config, state, image, label):
    """Gradient descent on the mean loss and nothing else."""
    images = image.astype(jnp.float32) / 127.5 - 1

    def loss_fn(params):
        logits, updates = make_model(config).apply(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return losses.mean(), updates["batch_stats"]

    (loss, stats), gradient = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    rate = config.learning_rate
    params = jax.tree.map(lambda p, g: p - rate * g, state.params, gradient)
    return params, stats, loss, gradient


@pytest.mark.report(3, 7)
@pytest.mark.parametrize(("how", "num_devices"), [("shard_map", 2), ("pmap", 4)])
def test_a_step_is_gradient_descent_on_the_mean_loss(how, num_devices):
    state, batch = first_state(DIGITS), make_batch(DIGITS)
    rows = (batch[name][batch["mask"]] for name in ("image", "label"))
    params, stats, loss, gradient = jax.device_get(plain_step(DIGITS, state, *rows))
    new, metrics = make_step(DIGITS, how, num_devices)(state, batch)
    assert_close(new.params, params, rtol=1e-5, atol=1e-6)
    assert_close(new.batch_stats, stats, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"] / metrics["count"], loss, rtol=1e-6)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


@pytest.mark.report(6)
def test_what_a_masked_row_holds_does_not_matter():
    state, batch = first_state(DIGITS), make_batch(DIGITS)
    other = make_batch(DIGITS, seed=1)
    shape = (-1, 1, 1, 1)
    batch_b = {
        "image": np.where(batch["mask"].reshape(shape), batch["image"], other["image"]),
        "label": np.where(batch["mask"], batch["label"], other["label"]),
        "mask": batch["mask"],
    }
    step = make_step(DIGITS)
    jax.tree.map(
        np.testing.assert_array_equal, step(state, batch), step(state, batch_b)
    )


@pytest.mark.report(5)
def test_a_batch_without_a_valid_row_moves_nothing():
    state, batch = first_state(DIGITS), make_batch(DIGITS)
    batch["mask"] = np.zeros(BATCH, bool)
    new, metrics = make_step(DIGITS)(state, batch)
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, new.batch_stats, state.batch_stats)
    assert {name: float(value) for name, value in metrics.items()} == {
        "loss": 0,
        "correct": 0,
        "count": 0,
        "grad_norm": 0,
    }


def test_step_and_position_count_updates_and_examples():
    state, _ = train_three_steps("shard_map", 4)
    assert (state.step, state.position) == (3, 3 * BATCH)
    assert state.step.dtype == state.position.dtype == np.int32


def test_metrics_are_sums_over_the_rows_that_count():
    logits = jnp.array([[5.0, 0, 0], [0, 5, 0], [0, 0, 5], [jnp.nan, 0, 0]])
    batch = {
        "label": jnp.array([0, 1, 1, 0]),
        "mask": jnp.array([True, True, True, False]),
    }
    sums = metrics_of(logits, batch)
    # -log softmax: log(1 + 2e⁻⁵) where right, 5 more where wrong.
    np.testing.assert_allclose(
        sums["loss"], 3 * np.log1p(2 * np.exp(-5)) + 5, rtol=1e-6
    )
    assert (sums["correct"], sums["count"]) == (2, 3)


def test_without_a_mask_every_row_counts():
    sums = metrics_of(jnp.zeros((4, 3)), {"label": jnp.array([0, 0, 1, 2])})
    assert (sums["correct"], sums["count"]) == (2, 4)


# The optimizer


@pytest.mark.report(37)
def test_l2_is_on_kernels_alone():
    config = dataclasses.replace(DIGITS, weight_decay=0.5, learning_rate=0.1)
    params = jax.tree.map(lambda p: p + 1, first_state(DIGITS).params)
    optimizer, zeros = make_optimizer(config), jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    expected = jax.tree_util.tree_map_with_path(
        lambda path, p: (-0.05 if path[-1].key == "kernel" else 0.0) * p, params
    )
    assert_close(updates, expected, rtol=1e-6)


def test_the_learning_rate_falls_in_stairs():
    config = dataclasses.replace(
        DIGITS, learning_rate=1.0, decay_rate=0.5, decay_steps=3
    )
    optimizer, w = make_optimizer(config), {"kernel": jnp.ones(())}
    state, rates = optimizer.init(w), []
    for _ in range(7):
        updates, state = optimizer.update(w, state, w)
        rates.append(-float(updates["kernel"]))
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_momentum_adds_up_gradients():
    config = dataclasses.replace(DIGITS, learning_rate=1.0, sgd_momentum=0.5)
    optimizer, w = make_optimizer(config), {"kernel": jnp.ones(())}
    _, state = optimizer.update(w, optimizer.init(w), w)
    updates, _ = optimizer.update(w, state, w)
    assert updates["kernel"] == -1.5


# The beginning


def test_the_first_state_depends_on_the_seed_alone():
    other = dataclasses.replace(DIGITS, learning_rate=0.5, parallel="pmap")
    chex.assert_trees_all_equal(first_state(DIGITS), first_state(other))
    params = first_state(dataclasses.replace(DIGITS, seed=1)).params
    kernel = first_state(DIGITS).params["hidden_1"]["kernel"]
    assert not np.array_equal(kernel, params["hidden_1"]["kernel"])


def test_without_batch_norm_there_are_no_batch_stats():
    state = jax.eval_shape(lambda: init_state(RUNS["mnist_sigmoid"]))
    assert state.batch_stats == {}


@pytest.mark.parametrize(
    ("dataset", "stem"), [("cifar10", "small"), ("imagenet2012", "imagenet")]
)
def test_inception_has_the_stem_for_its_pictures(dataset, stem):
    model = make_model(dataclasses.replace(RUNS["bn_x5"], dataset=dataset))
    assert model.stem == stem


def test_a_batch_that_does_not_divide_over_the_devices_is_an_error():
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    with pytest.raises(ValueError, match=r"batch_size=6 .* Choose a multiple of 4"):
        check_layout(dataclasses.replace(RUNS["bn_x5"], batch_size=6), mesh)
