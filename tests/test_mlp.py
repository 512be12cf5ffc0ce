import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from networks import (
    images,
    random_variables,
    shapes,
)

from bnjax.linen import BatchNorm
from bnjax.models import MLP


def test_mlp_has_the_layers_of_section_4_1():
    variables, outputs = shapes(MLP(), (2, 28, 28, 1))
    kernels = {k: v["kernel"].shape for k, v in variables["params"].items()}
    assert kernels == {
        "hidden_1": (784, 100),
        "hidden_2": (100, 100),
        "hidden_3": (100, 100),
        "output": (100, 10),
    }
    assert outputs["logits"].shape == (2, 10)


@pytest.mark.report(70)
def test_mlp_drops_the_biases_that_bn_would_subtract():
    variables, _ = shapes(MLP(norm=BatchNorm), (2, 28, 28))
    biased = {k for k, v in variables["params"].items() if "bias" in v}
    norms = {"hidden_1_bn", "hidden_2_bn", "hidden_3_bn"}
    assert set(variables["batch_stats"]) == norms
    assert biased == norms | {"output"}


def train_mlp(norm, x, mask=None):
    """Returns params, logits, and what training mode updates and sows."""
    model = MLP(features=(20, 30), norm=norm)
    variables = random_variables(model, x.shape)
    mutable = ["batch_stats", "intermediates"]
    apply = jax.jit(functools.partial(model.apply, train=True, mutable=mutable))
    logits, updates = apply(variables, x, mask=mask)
    return variables["params"], logits, updates


def test_mlp_sows_what_enters_each_sigmoid():
    x = images(16, 5)
    params, _, updates = train_mlp(None, x)
    first, second = updates["intermediates"]["preactivation"]
    np.testing.assert_allclose(
        first,
        x @ params["hidden_1"]["kernel"] + params["hidden_1"]["bias"][None],
        rtol=1e-5,
        atol=1e-5,
    )
    hidden = nn.sigmoid(first) @ params["hidden_2"]["kernel"]
    np.testing.assert_allclose(
        second, hidden + params["hidden_2"]["bias"][None], rtol=1e-5, atol=1e-5
    )


def test_mlp_sows_behind_bn():
    params, _, updates = train_mlp(BatchNorm, images(64, 5))
    last = np.asarray(updates["intermediates"]["preactivation"][-1])
    bn = params["hidden_2_bn"]
    np.testing.assert_allclose(last.mean(0), bn["bias"], atol=1e-5)
    np.testing.assert_allclose(last.std(0), bn["scale"], rtol=1e-3)


def test_mlp_masks_as_if_the_batch_were_smaller():
    x = images(8, 5)
    _, whole, updates = train_mlp(BatchNorm, x.at[5:].set(jnp.nan), jnp.arange(8) < 5)
    _, part, expected = train_mlp(BatchNorm, x[:5])
    np.testing.assert_allclose(whole[:5], part, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
        updates["batch_stats"], expected["batch_stats"], rtol=1e-4, atol=1e-5
    )
