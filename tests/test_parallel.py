"""Statistics over devices: every way to map, and what is communicated."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bnjax

MASKS = {
    "none": None,
    "uneven": np.array([1, 1, 1, 0, 0, 1, 1, 1]) > 0,
    "one empty device": np.array([1, 1, 0, 0, 1, 0, 0, 1]) > 0,
    "one device alone": np.array([0, 0, 1, 1, 0, 0, 0, 0]) > 0,
    "nothing": np.zeros(8, bool),
}


def near():
    return bnjax.BatchStats(jnp.array([2.5, -1.0, 0.0]), jnp.ones(3))


def far():
    return bnjax.BatchStats(jnp.full(3, 900.0), jnp.ones(3))


def batch():
    """Eight examples for four devices that have means of their own."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (8, 2, 3)) + np.repeat([0, 1, 5, -2], 2)[:, None, None]
    scale, bias = jnp.array([2.0, -0.5, 1.0]), jnp.array([0.0, 1.0, -1.0])
    return jnp.asarray(x, jnp.float32), scale, bias


def array(mask):
    return None if mask is None else jnp.asarray(mask)


def by_device(tree):
    return jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), tree)


def layer(x, scale, bias, mask, stats, **options):
    return bnjax.batch_norm(
        x, stats, scale=scale, bias=bias, mask=mask, momentum=0.5, **options
    )


def loss(x, scale, bias, mask, **options):
    """A sum over examples, and the layer's own results."""
    y, stats = layer(x, scale, bias, mask, **options)
    return (y**3 + y).sum(), (y, stats)


GRADIENT = functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)


@functools.cache
def on_one_device(mask, stats):
    """Gradients of x, γ and β, and the result and new running values."""
    gradient = jax.jit(GRADIENT(functools.partial(loss, stats=stats())))
    return gradient(*batch(), array(MASKS[mask]))


def mesh(shape=(4,), names=("i",), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def under_pmap(mask, stats):
    (x, mask), (_, scale, bias) = by_device((batch()[0], mask)), batch()

    def gradients(*args):
        cost = functools.partial(loss, axis_name="i", stats=stats)
        (dx, *rest), (y, new) = GRADIENT(cost)(*args)
        return (dx, y), (*jax.lax.psum(tuple(rest), "i"), new)

    mapped = jax.pmap(gradients, axis_name="i", in_axes=(0, None, None, 0))
    split, shared = mapped(x, scale, bias, mask)
    assert_equal_on_all_devices(shared)
    dx, y = (value.reshape(8, 2, 3) for value in split)
    dscale, dbias, new = jax.tree.map(lambda v: v[0], shared)
    return (dx, dscale, dbias), (y, new)


def assert_equal_on_all_devices(tree):
    first = jax.tree.map(lambda v: np.broadcast_to(v[:1], v.shape), tree)
    chex.assert_trees_all_equal(tree, first)


def under_shard_map(mask, stats, *, check_vma, inside):
    names = ("i",)
    cost = functools.partial(loss, axis_name=names, stats=stats)
    each, all_of_them = P("i"), P()

    def gradients(*args):
        (dx, *rest), aux = GRADIENT(cost)(*args)
        # With the check, the gradient of what all devices share is summed already.
        return (dx, *(rest if check_vma else jax.lax.psum(tuple(rest), names))), aux

    def total(*args):
        value, aux = cost(*args)
        return jax.lax.psum(value, names), aux

    aux_specs = each, all_of_them
    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=(each, all_of_them, all_of_them, each),
        check_vma=check_vma,
    )
    if inside:
        specs = (each, all_of_them, all_of_them), aux_specs
        return jax.jit(mapped(gradients, out_specs=specs))(*batch(), mask)
    outer = GRADIENT(mapped(total, out_specs=(all_of_them, aux_specs)))
    return jax.jit(outer)(*batch(), mask)


def under_vmap(mask, stats):
    def mapped(x, scale, bias, mask):
        here = functools.partial(layer, axis_name="i", stats=stats)
        over = jax.vmap(here, (0, None, None, 0), (0, None), axis_name="i")
        y, new = over(*by_device((x,)), scale, bias, by_device(mask))
        return (y**3 + y).sum(), (y.reshape(8, 2, 3), new)

    return jax.jit(GRADIENT(mapped))(*batch(), mask)


def under_jit(mask, stats, *, kind):
    x, scale, bias = batch()
    sharding = NamedSharding(mesh(kind=kind), P("i"))
    x, mask = jax.device_put((x, mask), sharding)
    scale, bias, stats = jax.device_put(
        (scale, bias, stats), NamedSharding(sharding.mesh, P())
    )
    cost = functools.partial(loss, stats=stats)
    return jax.jit(GRADIENT(cost))(x, scale, bias, mask)


MODES = {
    "pmap": under_pmap,
    "shard_map, grad inside": functools.partial(
        under_shard_map, check_vma=True, inside=True
    ),
    "shard_map, grad outside": functools.partial(
        under_shard_map, check_vma=True, inside=False
    ),
    "shard_map unchecked, grad inside": functools.partial(
        under_shard_map, check_vma=False, inside=True
    ),
    "shard_map unchecked, grad outside": functools.partial(
        under_shard_map, check_vma=False, inside=False
    ),
    "vmap": under_vmap,
    "jit, auto mesh": functools.partial(under_jit, kind=AxisType.Auto),
    "jit, explicit mesh": functools.partial(under_jit, kind=AxisType.Explicit),
}
CASES = [
    *((mode, "uneven") for mode in MODES),
    *((mode, "none") for mode in MODES),
    ("pmap", "one empty device"),
    ("shard_map, grad outside", "one empty device"),
    ("jit, explicit mesh", "one device alone"),
    ("shard_map, grad inside", "nothing"),
]


@pytest.mark.report(3, 4, 5, 18, 22, 51)
@pytest.mark.parametrize(("mode", "mask"), CASES)
def test_devices_give_what_one_device_gives(mode, mask):
    found = MODES[mode](array(MASKS[mask]), near())
    right = on_one_device(mask, near)
    chex.assert_trees_all_close(found, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["pmap", "shard_map, grad inside", "vmap"])
def test_devices_find_a_far_mean_together(mode):
    found = MODES[mode](array(MASKS["uneven"]), far())
    right = on_one_device("uneven", far)
    chex.assert_trees_all_close(found, right, rtol=2e-5, atol=3e-5)
    valid = np.asarray(batch()[0])[MASKS["uneven"]].reshape(-1, 3)
    _, var = oracle.population([valid])
    np.testing.assert_allclose(found[1][1].var, 0.5 + 0.5 * var, rtol=1e-6)


def test_outside_of_jit_nothing_is_compiled_twice(caplog):
    x, start = jnp.arange(8.0).reshape(4, 2), bnjax.init_batch_stats(2)
    bnjax.batch_norm(x, start)
    with jax.log_compiles():
        bnjax.batch_norm(x, start)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage()]
