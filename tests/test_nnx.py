"""The NNX module: equality with the Linen one, parity with Flax's, its variables."""

import inspect
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax import lax

import bnjax
from bnjax.linen import BatchNorm as LinenBatchNorm
from bnjax.nnx import BatchNorm


def normal(shape=(8, 3), seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(1.0, 2.0, shape)
    # Eighths are exact in every dtype, so that no rounding of the input differs.
    return jnp.asarray(np.round(values * 8) / 8, jnp.float32).astype(dtype)


def make(cls=BatchNorm, features=3, **options):
    return cls(features, rngs=nnx.Rngs(0), **options)


def move(value):
    return value + (jnp.arange(value.size) / 2 + 0.5).astype(value.dtype)


def moved(layer):
    """The layer, with all its values away from their start."""
    nnx.update(layer, jax.tree.map(move, nnx.state(layer)))
    return layer


def values(layer, kind):
    return nnx.to_pure_dict(nnx.state(layer, kind))


def stats(layer):
    return values(layer, nnx.BatchStat)


def in_both_modes(call, *args):
    """What a call gives in training and in evaluation, as one program."""
    modes = False, True
    run = jax.jit(lambda *args: [call(*args, use_running_average=m) for m in modes])
    return run(*args)


def results(layer, x, **of_call):
    """Results and running values, with copies of the layer."""
    graph, state = nnx.split(layer)

    def call(state, x, **flag):
        copy = nnx.merge(graph, state, copy=True)
        return copy(x, **flag, **of_call), stats(copy)

    return in_both_modes(call, state, x)


def linen_results(layer, x, *, dtype=None, options, **of_call):
    """What the Linen module gives with the layer's values."""
    module = LinenBatchNorm(dtype=dtype, **options)
    tree = {"params": values(layer, nnx.Param), "batch_stats": stats(layer)}

    def call(tree, x, **flag):
        y, tree = module.apply(tree, x, mutable=["batch_stats"], **flag, **of_call)
        return y, tree["batch_stats"]

    return in_both_modes(call, tree, x)


def both(x, features=3, **options):
    """Ours and Flax's, from the same state."""
    ours = moved(make(features=features, unbiased=False, **options))
    # Flax's fast variance cancels: on three values it is 1e-5 off.
    theirs = make(nnx.BatchNorm, features, use_fast_variance=False, **options)
    nnx.update(theirs, nnx.state(ours))
    return results(ours, x), results(theirs, x)


def assert_identical(ours, theirs):
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    chex.assert_trees_all_equal(ours, theirs)


def assert_same(ours, theirs, dtype="float32"):
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    # In evaluation Flax rounds each of its five operations to the dtype.
    rtol = {"bfloat16": 2**-6, "float16": 2**-9}.get(str(dtype), 3e-6)
    wide = [jax.tree.map(oracle.wide, tree) for tree in (ours, theirs)]
    chex.assert_trees_all_close(*wide, rtol=rtol, atol=rtol)


HALVES_TOO = ["float32", "bfloat16", "float16"]
every_dtype = pytest.mark.parametrize(
    ("input_dtype", "param_dtype", "dtype"),
    list(itertools.product(HALVES_TOO, HALVES_TOO[:2], [None, *HALVES_TOO])),
)


@every_dtype
def test_every_dtype_is_that_of_linen_bit_for_bit(input_dtype, param_dtype, dtype):
    x, options = normal(dtype=input_dtype), {"param_dtype": jnp.dtype(param_dtype)}
    layer = moved(make(dtype=dtype and jnp.dtype(dtype), **options))
    # NNX promotes with the running values too, which are float32.
    as_linen = linen_results(layer, x, dtype=dtype or "float32", options=options)
    assert_identical(results(layer, x), as_linen)


OPTIONS = {
    "no scale": {"use_scale": False},
    "no bias": {"use_bias": False},
    "neither": {"use_scale": False, "use_bias": False},
    "first axis": {"axis": 0},
    "middle axis": {"axis": -2},
    "momentum": {"momentum": 0.5},
    "epsilon": {"epsilon": 0.1},
}
OUR_OPTIONS = {
    "two passes": {"use_fast_variance": False},
    "biased": {"unbiased": False},
    "still": {"update_stats": False},
    "cumulative": {"momentum": None},
    "debiased": {"debias": True},
    "virtual batches": {"virtual_batch_size": 2},
    "renorm": {"renorm": bnjax.Renorm(1.5, 0.5)},
}


@pytest.mark.parametrize("name", [*OPTIONS, *OUR_OPTIONS])
def test_every_option_is_that_of_linen_bit_for_bit(name):
    options, x = {**OPTIONS, **OUR_OPTIONS}[name], normal((4, 3, 5))
    layer = moved(make(features=x.shape[options.get("axis", -1)], **options))
    mask = jnp.array([True, False, True, True])
    as_linen = linen_results(layer, x, options=options, mask=mask)
    assert_identical(results(layer, x, mask=mask), as_linen)


def numbers(dtype):
    x = normal()
    return lax.complex(x, normal(seed=1)) if dtype == "complex64" else x.astype(dtype)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float64"])
def test_every_kind_of_number_is_that_of_linen_bit_for_bit(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, layer = numbers(dtype), moved(make())
        assert_identical(results(layer, x), linen_results(layer, x, options={}))


MASKS = {
    "rows": np.arange(12).reshape(4, 3) % 4 > 0,
    "positions": np.arange(24).reshape(4, 3, 2) % 3 > 0,
    "elements": np.arange(72).reshape(4, 3, 2, 3) % 5 > 0,
    "none": np.zeros(4, bool),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_that_of_linen_bit_for_bit(name):
    x, mask, layer = normal((4, 3, 2, 3)), jnp.asarray(MASKS[name]), moved(make())
    x = jnp.where(mask.reshape(mask.shape + (1,) * (4 - mask.ndim)), x, jnp.nan)
    ours = results(layer, x, mask=mask)
    chex.assert_tree_all_finite(ours)
    assert_identical(ours, linen_results(layer, x, options={}, mask=mask))


@every_dtype
def test_every_dtype_is_as_in_flax(input_dtype, param_dtype, dtype):
    dtypes = {"dtype": dtype and jnp.dtype(dtype), "param_dtype": param_dtype}
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = both(normal(dtype=input_dtype), **dtypes)
    assert_same(ours, theirs, ours[0][0].dtype)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_as_in_flax(name):
    x, options = normal((4, 3, 5)), OPTIONS[name]
    assert_same(*both(x, x.shape[options.get("axis", -1)], **options))


# Flax itself stores float64 into float32 in this way.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible:FutureWarning")
@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_every_kind_of_real_number_is_as_in_flax(dtype):
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(dtype == "float64"):
        assert_same(*both(numbers(dtype)))


@pytest.mark.parametrize(
    ("input_dtype", "dtype"),
    [("float32", "float16"), ("bfloat16", None), ("int32", None), ("float32", None)],
)
def test_a_promote_dtype_that_promotes_nothing_is_as_in_flax(input_dtype, dtype):
    # Flax's own tests have its module follow the rule of Linen in this way.
    options = {"dtype": dtype, "promote_dtype": lambda args, **_: args}
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = both(normal().astype(input_dtype), **options)
    assert_same(ours, theirs, ours[0][0].dtype)


@pytest.mark.report(12)
@pytest.mark.parametrize(
    ("dtype", "mean", "var", "x", "right"),
    [("float16", 3000.7, 1e5, 3316, 0.99707), ("bfloat16", 1001, 1, 1002, 1.0)],
)
def test_half_precision_evaluation_keeps_the_signal(dtype, mean, var, x, right):
    layer = make(features=1, use_running_average=True, dtype=jnp.dtype(dtype))
    layer.mean[...], layer.var[...] = jnp.full(1, mean), jnp.full(1, var)
    y = layer(jnp.full((1, 1), x, jnp.float32))
    chex.assert_type(y, dtype)
    np.testing.assert_allclose(y.astype(jnp.float32), right, rtol=2**-8)


def test_half_precision_evaluation_gives_what_training_gave():
    x = jnp.array([[1000.0], [3000.0]], jnp.float16)
    layer = make(features=1, dtype=jnp.float16, momentum=0.0, unbiased=False)
    training, evaluation = layer(x), layer(x, use_running_average=True)
    assert training.tolist() == evaluation.tolist() == [[-1.0], [1.0]]


@pytest.mark.parametrize("method", ["__init__", "__call__", "set_view"])
def test_arguments_have_the_order_and_defaults_of_flax(method):
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (getattr(BatchNorm, method), getattr(nnx.BatchNorm, method))
    )
    assert ours[: len(theirs)] == theirs


def test_attributes_have_the_names_of_flax():
    assert vars(make(nnx.BatchNorm)).keys() <= vars(make()).keys()


@pytest.mark.parametrize("option", ["use_scale", "use_bias", "param_dtype"])
def test_variables_have_the_names_and_types_of_flax(option):
    options = {option: "bfloat16" if option == "param_dtype" else False}
    ours, theirs = (nnx.state(make(c, **options)) for c in (BatchNorm, nnx.BatchNorm))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert_identical(*map(nnx.to_pure_dict, (ours, theirs)))


def test_initializers_draw_the_keys_of_flax():
    inits = {"scale_init": jax.random.normal, "bias_init": jax.random.normal}
    trees = [values(make(c, **inits), nnx.Param) for c in (BatchNorm, nnx.BatchNorm)]
    assert_identical(*trees)


def test_metadata_goes_to_scale_and_bias():
    layer = make(scale_metadata={"note": "γ"}, bias_metadata={"note": "β"})
    assert (layer.scale.note, layer.bias.note) == ("γ", "β")


@pytest.mark.parametrize(
    "kinds",
    [(BatchNorm, nnx.BatchNorm), (nnx.BatchNorm, BatchNorm)],
    ids=["into", "from"],
)
def test_states_load_from_flax_and_into_flax(kinds):
    saved, into = (make(cls) for cls in kinds)
    nnx.update(into, nnx.state(moved(saved)))
    assert_identical(nnx.state(into), nnx.state(saved))


@pytest.mark.parametrize("option", [{"momentum": None}, {"debias": True}])
def test_a_count_of_calls_is_a_statistic_too(option):
    x, layer = normal(), make(**option)
    as_linen = LinenBatchNorm(**option).init(jax.random.key(0), x, True)
    assert_identical(stats(layer), as_linen["batch_stats"])
    layer(x)
    assert isinstance(layer.count, nnx.BatchStat)
    assert stats(layer)["count"].tolist() == [1.0] * 3


def test_the_running_variance_is_unbiased_by_default():
    x, layer = normal(), make(momentum=0.0)
    layer(x)
    mean, var = oracle.population([np.asarray(x)])
    chex.assert_trees_all_close(stats(layer), {"mean": mean, "var": var}, rtol=1e-6)


def test_half_precision_running_values_are_an_error():
    layer = make()
    nnx.update(layer, jax.tree.map(lambda v: v.astype("bfloat16"), nnx.state(layer)))
    with pytest.raises(TypeError, match="Keep batch_stats in float32"):
        layer(normal())


def test_one_element_per_feature_is_a_warning_and_gives_the_bias():
    layer = moved(make())
    with pytest.warns(UserWarning, match="one element per feature"):
        y = layer(normal((1, 3)))
    np.testing.assert_array_equal(y[0], layer.bias[...])
