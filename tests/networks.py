"""Shapes and variables of the models, without the minute that they take to compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from bnjax.models import Inception

IMAGENET = (1, 224, 224, 3)
QUICK = {"xla_backend_optimization_level": 0}  # compiles twice as fast
TINY = functools.partial(Inception, num_classes=10, stem="small", width=1 / 16)


def shapes(model, image_shape=IMAGENET):
    """Returns the shapes of the variables, and of the output of each submodule."""

    def run(key):
        return model.init_with_output(
            key,
            jnp.zeros(image_shape),
            train=False,
            capture_intermediates=True,
            mutable=True,
        )

    logits, variables = jax.eval_shape(run, jax.random.key(0))
    outputs = variables.pop("intermediates")
    return variables, {**outputs, "logits": logits}


@functools.cache
def published():
    """Returns `shapes` of the full network with BN."""
    return shapes(Inception())


def number(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def convolutions(params):
    """Returns the paths of the convolutions in a tree of parameters."""
    paths = [path[:-1] for path in flatten_dict(params) if path[-1] == "kernel"]
    return [path for path in paths if path != ("last_linear",)]


def convolution_channels(variables):
    params = variables["params"]
    flat = flatten_dict(params)
    return {path: flat[(*path, "kernel")].shape[-1] for path in convolutions(params)}


def random_variables(model, image_shape):
    """Returns variables without the minute that 70 initializers take to compile."""
    rng = np.random.default_rng(0)

    def draw(path, shape):
        fan_in = np.prod(shape.shape[:-1])
        spread = np.sqrt(2 / fan_in) if path[-1].key == "kernel" else 0.1
        center = 1 if path[-1].key in ("scale", "var") else 0
        value = center + spread * rng.standard_normal(shape.shape)
        return jnp.asarray(np.abs(value) if center else value, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes(model, image_shape)[0])


def images(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)
