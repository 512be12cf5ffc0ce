"""The Inception network in training and evaluation, of three modules."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import (
    QUICK,
    TINY,
    images,
    random_variables,
)

from bnjax.linen import BatchNorm
from bnjax.models import inception


@contextlib.contextmanager
def three_modules():
    """Leaves one Inception module of each kind; ten compile for half a minute."""
    kept = "inception_3a", "inception_3c", "inception_5b"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "MODULES", {k: inception.MODULES[k] for k in kept})
        yield


@pytest.fixture(scope="module")
def bn_network():
    """Returns variables and a function (x, mask) -> (new batch_stats, gradient)."""
    model = TINY(norm=functools.partial(BatchNorm, momentum=0.9))

    def loss(params, batch_stats, x, mask):
        variables = {"params": params, "batch_stats": batch_stats}
        y, updates = model.apply(
            variables, x, train=True, mask=mask, mutable=["batch_stats"]
        )
        losses = jnp.where(mask[:, None], jnp.square(y - 1), 0)
        return losses.sum(), updates["batch_stats"]

    x = images(8, 28, 28, 1)
    with three_modules():
        variables = random_variables(model, x.shape)
        start = variables["params"], variables["batch_stats"]
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        compiled = gradient.lower(*start, x, jnp.ones(8, bool)).compile(QUICK)

    def step(x, mask):
        grads, stats = compiled(*start, x, jnp.array(mask))
        return jax.device_get((stats, grads))

    return variables, step


def test_training_moves_every_running_value(bn_network):
    variables, step = bn_network
    stats, _ = step(images(8, 28, 28, 1), [True] * 8)
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).min(), stats, variables["batch_stats"]
    )
    assert min(jax.tree.leaves(moved)) > 0


def test_every_parameter_of_the_bn_network_has_a_gradient(bn_network):
    _, step = bn_network
    _, grads = step(images(8, 28, 28, 1), [True] * 8)
    largest = jax.tree.map(lambda g: np.abs(g).max(), grads)
    assert min(jax.tree.leaves(largest)) > 0


def test_masked_images_change_nothing_even_when_they_are_nan(bn_network):
    _, step = bn_network
    x = images(8, 28, 28, 1)
    mask = [True] * 6 + [False] * 2
    expected = step(x, mask)
    actual = step(x.at[6:].set(jnp.nan), mask)
    chex.assert_trees_all_equal(actual, expected)


def test_evaluation_uses_the_running_values_and_keeps_them():
    model = TINY()
    x = images(2, 28, 28, 1)
    with three_modules():
        variables = random_variables(model, x.shape)
        apply = functools.partial(model.apply, train=False)
        evaluate = jax.jit(apply, compiler_options=QUICK)
        alone = evaluate(variables, x[:1])
        together = evaluate(variables, x)  # immutable: an update would raise
    np.testing.assert_allclose(alone, together[:1], rtol=1e-4, atol=1e-4)
