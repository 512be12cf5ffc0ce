"""The Linen module: parity with Flax's, its variables, and what it adds."""

import functools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import linen as nn

import bnjax
from bnjax.linen import BatchNorm

KEY = jax.random.key(0)
TRAIN = functools.partial(BatchNorm, use_running_average=False)


def normal(shape=(6, 3), seed=0, dtype="float32"):
    values = np.random.default_rng(seed).normal(1.0, 2.0, shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def apply(module, variables, x, **options):
    """The result of a training or evaluation step, compiled, and what it changed."""
    options = {"mutable": ["batch_stats"], **options}
    return jax.jit(lambda v, x: module.apply(v, x, **options))(variables, x)


def both(x, training, **options):
    """Ours and Flax's, from the same variables, all of them away from their start."""
    options["use_running_average"] = not training
    # Flax's fast variance cancels: on three values it is 1e-5 off.
    flax_s = {**options, "use_fast_variance": False}
    modules = BatchNorm(unbiased=False, **options), nn.BatchNorm(**flax_s)

    @jax.jit  # one program for all of it compiles in a third of the time
    def run(x):
        variables = [module.init(KEY, x) for module in modules]
        moved = jax.tree.map(lambda v: v + jnp.asarray(0.5, v.dtype), variables[0])
        return variables, [m.apply(moved, x, mutable=["batch_stats"]) for m in modules]

    variables, results = run(x)
    chex.assert_trees_all_equal(*variables)
    return results


def assert_same(ours, flax_s, dtype):
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, flax_s)
    # One rounding of the result may fall to the other side.
    rtol = {"bfloat16": 2**-7, "float16": 2**-10}.get(str(dtype), 3e-6)
    wide = [jax.tree.map(oracle.wide, tree) for tree in (ours, flax_s)]
    chex.assert_trees_all_close(*wide, rtol=rtol, atol=rtol)


DTYPES = [None, "float32", "bfloat16", "float16"]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("input_dtype", ["float32", "bfloat16"])
def test_every_dtype_is_as_in_flax(input_dtype, param_dtype, dtype, training):
    options = {"dtype": dtype and jnp.dtype(dtype), "param_dtype": param_dtype}
    with jax.numpy_dtype_promotion("standard"):  # Flax's own code asks for it
        ours, flax_s = both(normal(dtype=input_dtype), training, **options)
    assert_same(ours, flax_s, ours[0].dtype)


OPTIONS = {
    "no scale": {"use_scale": False},
    "no bias": {"use_bias": False},
    "neither": {"use_scale": False, "use_bias": False},
    "first axis": {"axis": 0},
    "middle axis": {"axis": -2},
    "two axes": {"axis": (2, 0)},
    "momentum": {"momentum": 0.5},
    "epsilon": {"epsilon": 0.1},
    "two passes": {"use_fast_variance": False},
    "initializers": {"bias_init": nn.initializers.normal(), "scale_init": nn.zeros},
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_as_in_flax(name, training):
    with jax.numpy_dtype_promotion("standard"):
        ours, flax_s = both(normal((4, 3, 5)), training, **OPTIONS[name])
    assert_same(ours, flax_s, "float32")


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_other_inputs_are_as_in_flax(dtype):
    with jax.numpy_dtype_promotion("standard"):
        ours, flax_s = both((normal() * 3).astype(dtype), training=True)
    assert_same(ours, flax_s, "float32")


def test_running_values_stay_float32_beside_float64():
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        ours, flax_s = both(normal(dtype="float64"), training=True)
        chex.assert_type(jax.tree.leaves(ours[1]), jnp.float32)
        np.testing.assert_allclose(ours[0], flax_s[0], rtol=1e-12)


def test_fields_come_in_the_order_of_flax():
    ours, theirs = (list(m.__dataclass_fields__) for m in (BatchNorm, nn.BatchNorm))
    assert [name for name in ours if name in theirs] == theirs
    assert ours[: len(theirs) - 2] == theirs[:-2]


def test_half_precision_works_under_strict_promotion():
    x = normal(dtype="bfloat16")
    y, variables = jax.jit(TRAIN(dtype=jnp.bfloat16).init_with_output)(KEY, x)
    chex.assert_type(y, jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_wide_input_is_rounded_after_it_is_normalized(training):
    x, module = normal() + 1000, BatchNorm(dtype=jnp.bfloat16, momentum=0.0)
    step = functools.partial(apply, module, use_running_average=not training)
    variables = jax.jit(TRAIN().init)(KEY, x)
    stats = {"mean": jnp.full(3, 1001.0), "var": jnp.full(3, 4.0)}
    y, _ = step({**variables, "batch_stats": stats}, x)
    mean, var = oracle.batch_moments(x)[:2] if training else stats.values()
    right = oracle.inference(x, *map(np.asarray, (mean, var)), np.ones(3), np.zeros(3))
    np.testing.assert_allclose(y.astype(jnp.float32), right, rtol=2**-8, atol=1e-4)


def test_the_running_variance_is_unbiased_by_default():
    x = normal()
    _, changed = apply(TRAIN(momentum=0.0), TRAIN().init(KEY, x), x)
    mean, var = oracle.population([np.asarray(x)])
    right = {"batch_stats": {"mean": mean, "var": var}}
    chex.assert_trees_all_close(changed, right, rtol=1e-6)


def test_update_stats_off_leaves_the_running_values():
    x, module = normal(), TRAIN(update_stats=False)
    variables = module.init(KEY, x)
    y, changed = apply(module, variables, x)
    chex.assert_trees_all_equal(changed["batch_stats"], variables["batch_stats"])
    chex.assert_trees_all_close(y, apply(TRAIN(), variables, x)[0], rtol=1e-6)


def untouched(variables):
    stats = variables["batch_stats"]
    return not stats["mean"].any() and bool((stats["var"] == 1).all())


def test_init_does_not_look_at_the_data():
    assert untouched(jax.jit(TRAIN().init)(KEY, normal() * 3))


@pytest.mark.report(20, 21)
@pytest.mark.parametrize("axis_name", ["i", ("i", "j")])
def test_init_and_evaluation_need_no_bound_axis(axis_name):
    module, x = BatchNorm(axis_name=axis_name), normal()
    groups = BatchNorm(axis_name="i", axis_index_groups=[[0, 1], [2, 3]])
    variables = module.init(KEY, x, use_running_average=False)
    assert untouched(variables)
    assert untouched(groups.init(KEY, x, use_running_average=False))
    chex.assert_shape(module.apply(variables, x, use_running_average=True), (6, 3))


def test_training_with_an_unbound_axis_is_an_error():
    module, x = TRAIN(axis_name="batch"), normal()
    variables = module.init(KEY, x)
    with pytest.raises(NameError, match="axis_name='batch' is not bound here"):
        module.apply(variables, x, mutable=["batch_stats"])


@pytest.mark.report(63)
def test_eval_shape_and_tabulate_change_nothing():
    x, module = normal(), TRAIN()
    variables = module.init(KEY, x)
    table = module.tabulate(KEY, x)
    step = functools.partial(module.apply, mutable=["batch_stats"])
    shapes = jax.eval_shape(step, variables, x)[1]
    assert "batch_stats" in table
    chex.assert_trees_all_equal_shapes_and_dtypes(
        shapes["batch_stats"], variables["batch_stats"]
    )
    assert untouched(variables)


@pytest.mark.report(7)
def test_training_with_immutable_statistics_is_an_error():
    module, x = TRAIN(), normal()
    variables = module.init(KEY, x)
    with pytest.raises(flax.errors.ModifyScopeVariableError, match="batch_stats"):
        module.apply(variables, x)


def test_training_without_moving_statistics_needs_none_mutable():
    module, x = TRAIN(update_stats=False), normal()
    y = module.apply(module.init(KEY, x), x)
    chex.assert_shape(y, (6, 3))


MASKS = {
    "examples": np.arange(4) < 2,
    "rows": np.arange(12).reshape(4, 3) % 4 > 0,
    "positions": np.arange(24).reshape(4, 3, 2) % 3 > 0,
    "positions, full rank": np.arange(24).reshape(4, 3, 2, 1) > 8,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bool") for name in MASKS), ("rows", "int32"), ("rows", "float32")],
)
def test_masks_are_those_of_the_core(name, dtype):
    x, mask = normal((4, 3, 2, 3)), jnp.asarray(MASKS[name], dtype)
    variables = jax.jit(TRAIN().init)(KEY, x)
    y, changed = apply(TRAIN(), variables, x, mask=mask)
    right, stats = jax.jit(bnjax.batch_norm)(x, bnjax.init_batch_stats(3), mask=mask)
    chex.assert_trees_all_close(
        (y, changed["batch_stats"]), (right, stats._asdict()), rtol=1e-6, atol=1e-6
    )


def test_evaluation_writes_zero_behind_the_mask():
    x = normal().at[0].set(jnp.nan)
    module, mask = BatchNorm(use_running_average=True), jnp.arange(6) > 0
    y = module.apply(module.init(KEY, x), x, mask=mask)
    chex.assert_tree_all_finite(y)
    assert not y[0].any()


@pytest.mark.report(69)
@pytest.mark.parametrize("of_class", [None, True, False])
@pytest.mark.parametrize("of_call", [True, False])
def test_the_flag_of_the_call_takes_precedence(of_class, of_call):
    x, module = normal(), BatchNorm(use_running_average=of_class)
    variables = module.init(KEY, x, use_running_average=True)
    _, changed = apply(module, variables, x, use_running_average=of_call)
    assert untouched(changed) == of_call


def test_no_flag_at_all_is_an_error():
    with pytest.raises(ValueError, match="use_running_average"):
        BatchNorm().init(KEY, normal())


def test_a_single_example_is_an_error_in_training_but_not_while_initializing():
    module, x = TRAIN(), normal((1, 3))
    variables = module.init(KEY, x)
    with pytest.raises(ValueError, match="one element per feature"):
        module.apply(variables, x, mutable=["batch_stats"])


def test_half_precision_running_values_are_an_error():
    module, x = TRAIN(), normal()
    half = jax.tree.map(lambda v: v.astype(jnp.bfloat16), module.init(KEY, x))
    with pytest.raises(TypeError, match="Keep batch_stats in float32"):
        module.apply(half, x, mutable=["batch_stats"])


def test_an_axis_that_x_does_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"names axes \[7\], but x has rank 2"):
        TRAIN(axis=7).init(KEY, normal())


@pytest.mark.report(36)
def test_remat_moves_the_running_values_once():
    x, module = normal(), nn.remat(BatchNorm)(use_running_average=False, momentum=0.5)
    variables = module.init(KEY, x)

    def loss(params):
        tree = {**variables, "params": params}
        y, changed = module.apply(tree, x, mutable=["batch_stats"])
        return (y**3).sum(), changed

    _, changed = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    np.testing.assert_allclose(
        changed["batch_stats"]["mean"], 0.5 * np.asarray(x).mean(0), rtol=1e-5
    )


@pytest.mark.report(69)
def test_it_fits_into_sequential():
    model, x = nn.Sequential([nn.Dense(4), TRAIN(), nn.relu]), normal()
    y, changed = apply(model, model.init(KEY, x), x)
    chex.assert_shape(y, (6, 4))
    assert not untouched({"batch_stats": changed["batch_stats"]["layers_1"]})


def test_devices_share_statistics():
    module, x = TRAIN(axis_name="i", momentum=0.0), normal((4, 2, 3))
    variables = module.init(KEY, x[0])
    step = functools.partial(module.apply, mutable=["batch_stats"])
    _, changed = jax.pmap(step, axis_name="i", in_axes=(None, 0))(variables, x)
    mean, var = oracle.population([np.asarray(x).reshape(8, 3)])
    for k in (0, 3):
        here = jax.tree.map(lambda v, k=k: v[k], changed["batch_stats"])
        chex.assert_trees_all_close(here, {"mean": mean, "var": var}, rtol=1e-5)
