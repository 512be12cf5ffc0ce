import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from networks import (
    QUICK,
    TINY,
    convolution_channels,
    convolutions,
    images,
    number,
    published,
    random_variables,
    shapes,
)

from bnjax.linen import BatchNorm
from bnjax.models import Inception
from bnjax.models.layers import (
    ExampleDropout,
    max_pool,
)

SIZES = {  # H = W and channels behind each stage, at 224×224
    "conv1_7x7_s2": (112, 64),
    "conv2_3x3": (56, 192),
    "inception_3a": (28, 256),
    "inception_3b": (28, 320),
    "inception_3c": (14, 576),
    "inception_4a": (14, 576),
    "inception_4b": (14, 576),
    "inception_4c": (14, 608),
    "inception_4d": (14, 608),
    "inception_4e": (7, 1056),
    "inception_5a": (7, 1024),
    "inception_5b": (7, 1024),
}


@pytest.mark.report(55)
def test_inception_has_the_parameters_of_the_published_network():
    variables, _ = published()
    assert number(variables["params"]) == 11_285_224


@pytest.mark.report(55)
def test_inception_has_69_convolutions_each_with_a_bn():
    variables, _ = published()
    paths = convolutions(variables["params"])
    norms = {path[:-1] for path in flatten_dict(variables["batch_stats"])}
    assert len(paths) == 69
    assert norms == {(*path[:-1], f"{path[-1]}_bn") for path in paths}


@pytest.mark.report(55)
def test_inception_has_10016_bn_channels():
    variables, _ = published()
    assert number(variables["batch_stats"]) == 2 * 10_016


@pytest.mark.report(54)
@pytest.mark.parametrize(("stage", "expected"), SIZES.items(), ids=SIZES)
def test_stage_has_the_size_and_channels_of_the_paper(stage, expected):
    _, outputs = published()
    size, channels = expected
    assert outputs[stage]["__call__"][0].shape == (1, size, size, channels)


def test_without_norm_the_convolutions_have_biases_and_nothing_is_normalized():
    variables, _ = shapes(Inception(norm=None))
    assert set(variables) == {"params"}
    assert number(variables["params"]) == 11_285_224 - 10_016
    params = flatten_dict(variables["params"])
    assert all((*path, "bias") in params for path in convolutions(variables["params"]))


@pytest.mark.report(70)
def test_with_norm_no_convolution_has_a_bias():
    params = published()[0]["params"]
    flat = flatten_dict(params)
    assert not any((*path, "bias") in flat for path in convolutions(params))


@pytest.mark.report(55)
def test_every_convolution_is_followed_by_the_activation():
    calls = []
    shapes(Inception(activation=lambda x: calls.append(x.shape) or x))
    assert len(calls) == 69


@pytest.mark.report(54)
def test_convolutions_pad_alike_on_both_sides_whatever_the_stride():
    seen = set()

    def spy(call, args, kwargs, context):
        if isinstance(conv := context.module, nn.Conv):
            seen.add((conv.kernel_size, conv.strides, conv.padding))
        return call(*args, **kwargs)

    with nn.intercept_methods(spy):
        shapes(Inception())
    assert seen == {((7, 7), 2, 3), ((3, 3), 1, 1), ((3, 3), 2, 1)}


@pytest.mark.report(54)
def test_max_pools_round_even_sizes_up_and_keep_the_last_size(monkeypatch):
    seen = []
    spy = lambda x, *window: seen.append(window) or max_pool(x, *window)  # noqa: E731
    monkeypatch.setattr("bnjax.models.inception.max_pool", spy)
    shapes(Inception())
    ceil, same = (2, ((0, 1), (0, 1))), (1, ((1, 1), (1, 1)))
    assert seen == [ceil, ceil, ceil, ceil, same]


def test_width_scales_the_channels_of_every_convolution():
    full = convolution_channels(published()[0])
    half = convolution_channels(shapes(Inception(width=0.5))[0])
    assert half == {path: channels // 2 for path, channels in full.items()}


def test_the_smallest_width_leaves_one_channel():
    variables, _ = shapes(Inception(width=1e-6))
    assert set(convolution_channels(variables).values()) == {1}


@pytest.mark.parametrize(("size", "last"), [(28, 4), (32, 4), (64, 8), (33, 5)])
def test_small_stem_takes_small_and_odd_sizes(size, last):
    _, outputs = shapes(TINY(), (2, size, size, 1))
    assert outputs["inception_5b"]["__call__"][0].shape == (2, last, last, 64)
    assert outputs["logits"].shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem": "big"}, "stem='big' is unknown. Allowed: 'imagenet', 'small'"),
        ({"width": 0.0}, "width=0.0 must be greater than 0"),
        ({"width": float("nan")}, "width=nan must be greater than 0"),
        ({"dropout_rate": 1.0}, r"dropout rate 1.0 lies outside \[0, 1\)"),
    ],
)
def test_inception_rejects(options, message):
    with pytest.raises(ValueError, match=message):
        shapes(Inception(**options))


def test_inception_rejects_images_without_channels():
    with pytest.raises(ValueError, match=r"x has shape \(28, 28, 1\)"):
        shapes(TINY(), (28, 28, 1))


GATED = "inception_3c", "inception_4e"  # modules whose pool has no convolution


@functools.cache
def gated_network():
    """Returns variables and a compiled (params, gates) -> logits of the baseline.

    `gates` multiply the pooled channels of the modules in GATED.
    """
    model = TINY(norm=None)
    variables = random_variables(model, (2, 28, 28, 1))
    x = images(2, 28, 28, 1)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def logits(params, gates):
        def gate(call, args, kwargs, context):
            y = call(*args, **kwargs)
            if context.module.name in gates:
                pooled = args[0].shape[-1]
                y = y.at[..., -pooled:].multiply(gates[context.module.name])
            return y

        with nn.intercept_methods(gate):
            return model.apply({"params": params}, x, train=False)

    return variables["params"], logits


ALL_CONVOLUTIONS = convolutions(shapes(TINY(), (2, 28, 28, 1))[0]["params"])


@pytest.mark.report(55)
@pytest.mark.parametrize("path", ALL_CONVOLUTIONS, ids="/".join)
def test_every_convolution_reaches_the_output(path):
    params, logits = gated_network()
    ones = dict.fromkeys(GATED, 1.0)
    flat = flatten_dict(params, sep="/")
    dead = {key: 0 * flat[key] for key in flat if key.startswith(f"{'/'.join(path)}/")}
    without = unflatten_dict({**flat, **dead}, sep="/")
    assert jnp.abs(logits(params, ones) - logits(without, ones)).max() > 1e-5


@pytest.mark.report(55)
@pytest.mark.parametrize("module", GATED)
def test_every_pool_that_passes_through_reaches_the_output(module):
    params, logits = gated_network()
    ones = dict.fromkeys(GATED, 1.0)
    change = logits(params, ones) - logits(params, {**ones, module: 0.0})
    assert jnp.abs(change).max() > 1e-5


@pytest.mark.parametrize("norm", [None, BatchNorm])
def test_bfloat16_computes_in_it_and_keeps_variables_in_float32(norm):
    variables, outputs = shapes(TINY(dtype=jnp.bfloat16, norm=norm), (2, 28, 28, 1))
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    chex.assert_type(outputs["logits"], jnp.bfloat16)
    chex.assert_type(outputs["inception_5b"]["__call__"][0], jnp.bfloat16)


def test_flax_batch_norm_takes_the_place_of_ours():
    ours, _ = shapes(TINY(), (2, 28, 28, 1))
    flax, _ = shapes(TINY(norm=nn.BatchNorm), (2, 28, 28, 1))
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, flax)


def test_local_response_norm_stands_behind_pool_1_and_convolution_2(monkeypatch):
    seen = []
    spy = lambda x: seen.append(x.shape) or x  # noqa: E731
    monkeypatch.setattr("bnjax.models.inception.local_response_norm", spy)
    shapes(Inception(local_response_norm=True))
    assert seen == [(1, 56, 56, 64), (1, 56, 56, 192)]


def test_inception_hands_rate_and_axis_to_dropout():
    seen = []

    def spy(call, args, kwargs, context):
        if isinstance(context.module, ExampleDropout):
            seen.append((context.module.rate, context.module.axis_name, args[0].shape))
        return call(*args, **kwargs)

    with nn.intercept_methods(spy):
        shapes(Inception(dropout_rate=0.4, axis_name="batch"))
    assert seen == [(0.4, "batch", (1, 1024))]
