"""What devices share: sub-axes, groups, the collectives themselves, and errors."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bnjax
from bnjax import reduction
from bnjax.linen import BatchNorm
from bnjax.models.inception import MODULES, InceptionModule

START = bnjax.init_batch_stats(2)


def batch(shape=(8, 3, 2)):
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, shape) + np.arange(shape[0]).reshape(
        -1, *[1] * (len(shape) - 1)
    )
    return jnp.asarray(x, jnp.float32)


def mesh(shape=(4,), names=("i",), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def moments_over(axis_name, x, **options):
    """Moments in each of 2 × 2 devices; x is `(8, ...)`, the result `(2, 2, C)`."""

    def here(x):
        moments = bnjax.batch_moments(x, axis_name=axis_name, **options)
        return jax.tree.map(lambda v: v[None, None], moments)

    grid, spec = mesh((2, 2), ("outer", "inner")), P(("outer", "inner"))
    mapped = jax.shard_map(
        here, mesh=grid, in_specs=spec, out_specs=P("outer", "inner"), check_vma=False
    )
    return jax.jit(mapped)(x)


def right_moments(x):
    return oracle.batch_moments(np.asarray(x).reshape(-1, x.shape[-1]))


def test_a_tuple_of_axes_pools_over_all_of_them():
    x = batch()
    moments = moments_over(("outer", "inner"), x)
    for value, right in zip(moments, right_moments(x), strict=True):
        np.testing.assert_allclose(value, np.broadcast_to(right, (2, 2, 2)), rtol=1e-6)


@pytest.mark.parametrize(
    ("axis_name", "parts"),
    [("inner", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("outer", [[0, 1, 4, 5], [2, 3, 6, 7]])],
)
def test_one_axis_of_two_pools_over_that_one(axis_name, parts):
    x = batch()
    found = moments_over(axis_name, x)
    if axis_name == "outer":
        found = jax.tree.map(lambda v: v.swapaxes(0, 1), found)
    for row, rows in enumerate(parts):
        right = right_moments(x[np.array(rows)])
        here = tuple(value[row, 0] for value in found)
        chex.assert_trees_all_close(here, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_group_may_be_far_from_its_running_mean_and_the_other_near(check_vma):
    x = batch().at[4:].add(5000.0)

    def here(x):
        y, _ = bnjax.batch_norm(x, START, axis_name="inner")
        return y

    spec = P(("outer", "inner"))
    mapped = jax.shard_map(
        here,
        mesh=mesh((2, 2), ("outer", "inner")),
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )
    halves = [np.asarray(x[:4]).reshape(12, 2), np.asarray(x[4:]).reshape(12, 2)]
    right = [oracle.batch_norm(half, np.ones(2), np.zeros(2)) for half in halves]
    y = jax.jit(mapped)(x)
    np.testing.assert_allclose(y, np.reshape(right, (8, 3, 2)), rtol=1e-5, atol=2e-6)


def test_nested_vmap_pools_over_both_axes():
    x = batch((2, 3, 4, 2))
    here = functools.partial(bnjax.batch_moments, axis_name=("a", "b"))
    nested = jax.vmap(jax.vmap(here, axis_name="b"), axis_name="a")
    moments = jax.jit(nested)(x)
    right = right_moments(x)
    for value, wanted in zip(moments, right, strict=True):
        np.testing.assert_allclose(value, np.broadcast_to(wanted, (2, 3, 2)), rtol=1e-6)


def test_vmap_over_networks_outside_of_the_devices_keeps_them_apart():
    x = batch((4, 4, 2)).reshape(2, 2, 4, 2).at[1].add(50.0)
    here = functools.partial(bnjax.batch_moments, axis_name="i")
    moments = jax.jit(jax.vmap(jax.vmap(here, axis_name="i")))(x)
    for k in (0, 1):
        found = tuple(value[k, 0] for value in moments)
        chex.assert_trees_all_close(found, right_moments(x[k]), rtol=1e-6, atol=1e-6)


def test_features_may_be_sharded_too():
    x = batch((8, 3, 4))
    spread = jax.device_put(
        x, NamedSharding(mesh((2, 2), ("data", "model"), AxisType.Explicit),
                         P("data", None, "model")))  # fmt: skip
    moments = jax.jit(bnjax.batch_moments)(spread)
    chex.assert_trees_all_close(tuple(moments), right_moments(x), rtol=1e-6, atol=1e-6)


GROUPS = [[0, 1], [2, 3]]


def with_groups(mode, groups=GROUPS):
    def here(x):
        y, _ = bnjax.batch_norm(
            x, START, axis_name="i", axis_index_groups=groups, momentum=0.0
        )
        return y

    x = batch()
    if mode == "vmap":
        return jax.vmap(here, axis_name="i")(x.reshape(4, 2, 3, 2))
    if mode == "pmap":
        return jax.pmap(here, axis_name="i")(x.reshape(4, 2, 3, 2))
    mapped = jax.shard_map(
        here,
        mesh=mesh(),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=mode == "checked",
    )
    return jax.jit(mapped)(x)


@pytest.mark.report(23, 66)
@pytest.mark.parametrize("mode", ["pmap", "unchecked"])
def test_groups_of_devices_normalize_among_themselves(mode):
    halves = np.asarray(batch()).reshape(2, 12, 2)
    right = [oracle.batch_norm(half, np.ones(2), np.zeros(2)) for half in halves]
    y = with_groups(mode)
    np.testing.assert_allclose(y.ravel(), np.ravel(right), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mode", ["vmap", "checked"])
def test_groups_where_jax_has_none_are_an_error_that_shows_the_way(mode):
    with pytest.raises(NotImplementedError, match=r"check_vma=False only.*make_mesh"):
        with_groups(mode)


@pytest.mark.parametrize("groups", [[[0], [1, 2, 3]], []], ids=["uneven", "none"])
def test_groups_of_different_sizes_are_an_error(groups):
    with pytest.raises(ValueError, match="must be groups of one size"):
        with_groups("pmap", groups)


def all_reduces(function, *args):
    """Returns how many the compiled program always runs, and how many it may."""
    text = jax.jit(function).lower(*args).compile().as_text()
    (entry,) = re.findall(r"^ENTRY .*?^}", text, re.M | re.S)
    pattern = r"= \S+ all-reduce(?:-start)?\(|= \([^=]*\) all-reduce(?:-start)?\("
    always, total = (len(re.findall(pattern, part)) for part in (entry, text))
    return always, total - always


def norm(x, mask=None, axis_name="i", **options):
    return bnjax.batch_norm(x, START, mask=mask, axis_name=axis_name, **options)


def in_shard_map(function, check_vma=True):
    return jax.shard_map(
        function,
        mesh=mesh(),
        in_specs=(P("i"), P("i")),
        out_specs=P("i"),
        check_vma=check_vma,
    )


def dx(x, mask, **options):
    return jax.grad(lambda x: (norm(x, mask, **options)[0] ** 3).sum())(x)


MASKED = pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
CHECKED = pytest.mark.parametrize("check_vma", [False, True])


def arguments(masked):
    return batch(), jnp.arange(8) % 3 > 0 if masked else None


@MASKED
@CHECKED
def test_the_forward_pass_sums_once_and_once_more_if_far(masked, check_vma):
    mapped = in_shard_map(lambda x, mask: norm(x, mask)[0], check_vma)
    assert all_reduces(mapped, *arguments(masked)) == (1, 1)


@MASKED
@CHECKED
def test_the_backward_pass_sums_once(masked, check_vma):
    mapped = in_shard_map(dx, check_vma)
    assert all_reduces(mapped, *arguments(masked)) == (2, 1)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_sharded_jit_sums_as_often(masked):
    args = jax.device_put(arguments(masked), NamedSharding(mesh(), P("i")))
    assert all_reduces(functools.partial(dx, axis_name=None), *args) == (2, 1)


@pytest.mark.report(20)
def test_evaluation_sums_nothing():
    mapped = in_shard_map(lambda x, mask: norm(x, mask, use_running_average=True)[0])
    assert all_reduces(mapped, *arguments(True)) == (0, 0)


def test_evaluation_needs_no_bound_axis():
    y, _ = norm(batch(), use_running_average=True)
    chex.assert_shape(y, (8, 3, 2))


def test_an_unbound_axis_is_an_error_that_says_what_to_do():
    message = r"axis_name='i' is not bound here; bound axes: none\..*axis_name=None"
    with pytest.raises(NameError, match=message):
        norm(batch())


def test_the_error_of_an_unbound_axis_lists_those_that_are_bound():
    here = functools.partial(norm, axis_name=("data", "i"))
    with pytest.raises(NameError, match=r"axis_name=\('data', 'i'\).*axes: 'data'\."):
        jax.vmap(here, axis_name="data")(batch())


def test_the_bound_axes_are_unknown_where_jax_hides_them(monkeypatch):
    monkeypatch.delattr(jax._src.core, "get_axis_env")
    assert reduction._bound_axes() == "unknown"


def test_one_example_on_each_device_is_enough():
    x = np.asarray(batch((4, 2)))
    mapped = jax.pmap(norm, axis_name="i")
    y, new = mapped(x[:, None])
    right = oracle.batch_norm(x, np.ones(2), np.zeros(2))
    np.testing.assert_allclose(y[:, 0], right, rtol=1e-5, atol=1e-6)
    chex.assert_shape(new.var, (4, 2))


def test_a_single_element_over_all_devices_is_an_error():
    with pytest.raises(ValueError, match="one element per feature over all devices"):
        jax.vmap(norm, axis_name="i")(batch((1, 1, 2)))


def test_statistics_of_one_device_may_not_pass_for_those_of_all():
    mapped = jax.shard_map(
        lambda x: norm(x, axis_name=None)[1],
        mesh=mesh(),
        in_specs=P("i"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(mapped).lower(batch())


def test_parallel_branches_share_their_sums():
    module = InceptionModule(
        row=MODULES["inception_3a"],
        width=0.125,
        norm=functools.partial(BatchNorm, axis_name="i"),
        activation=jax.nn.relu,
        kernel_init=jax.nn.initializers.normal(),
        dtype=jnp.float32,
    )
    x = jnp.zeros((4, 4, 4, 8))
    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), x, train=False))
    mapped = jax.shard_map(
        lambda variables, x: module.apply(
            variables, x, train=True, mutable=["batch_stats"]
        )[0],
        mesh=mesh(),
        in_specs=(P(), P("i")),
        out_specs=P("i"),
    )
    always, _ = all_reduces(mapped, variables, x)
    # Seven layers, three of them one behind the other; XLA:CPU joins the others.
    assert 3 <= always < 6
