"""What users of other libraries reported: meshes, axis names, who sums with whom."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import bnjax
from bnjax.linen import BatchNorm
from train.parallel import AXIS, make_mesh, parallelize

START = bnjax.init_batch_stats(3)
norm = functools.partial(bnjax.batch_norm, axis_name="d")


def rows():
    values = np.random.default_rng(0).normal(3, 2, (16, 3))
    return jnp.asarray(values, jnp.float32)


@pytest.mark.report(15)
def test_four_devices_with_one_example_each_are_a_batch_of_four():
    x = jnp.array([0.0, 2, 4, 6])[:, None, None]
    y, new = jax.pmap(norm, axis_name="d", in_axes=(0, None))(
        x, bnjax.init_batch_stats(1)
    )
    np.testing.assert_allclose(y[:, 0, 0], np.arange(-3, 4, 2) / 5**0.5, rtol=1e-5)
    # 4/3 of the variance 5, in a hundredth.
    np.testing.assert_allclose(new.var, np.full((4, 1), 0.99 + 0.2 / 3), rtol=1e-6)


@pytest.mark.report(22)
def test_an_axis_name_under_sharded_jit_is_an_error_that_says_to_leave_it_out():
    mesh = jax.make_mesh((4,), ("d",))
    x = jax.device_put(rows(), NamedSharding(mesh, P("d")))
    message = "axis_name='d' is not bound here.*global already: use axis_name=None"
    with pytest.raises(NameError, match=message):
        jax.jit(norm)(x, START)


@pytest.mark.report(24)
def test_a_mesh_with_the_axes_of_todays_jax_gives_the_right_gradient():
    mesh = jax.make_mesh((4,), ("d",))

    def loss(scale, x, axis_name):
        value = (norm(x, START, scale=scale, axis_name=axis_name)[0] ** 3 * x).mean()
        return value if axis_name is None else jax.lax.pmean(value, axis_name)

    here = jax.shard_map(
        jax.grad(functools.partial(loss, axis_name="d")),
        mesh=mesh,
        in_specs=(P(), P("d")),
        out_specs=P(),
    )
    scale, x = jnp.array([1.0, -2.0, 0.5]), rows()
    found = jax.jit(here)(
        jax.device_put(scale, NamedSharding(mesh, P())),
        jax.device_put(x, NamedSharding(mesh, P("d"))),
    )
    right = jax.jit(jax.grad(functools.partial(loss, axis_name=None)))(scale, x)
    np.testing.assert_allclose(found, right, rtol=1e-5)


@pytest.mark.report(24)
@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_a_step_of_the_program_takes_arrays_of_the_host(how):
    def step(state, batch):
        return state, jax.lax.psum(batch["x"].sum(), AXIS)

    run = parallelize(step, make_mesh(), how)
    _, total = run(np.zeros(1), {"x": np.arange(8.0, dtype=np.float32)})
    assert total == 28


@pytest.mark.report(51)
def test_a_module_pools_over_vmap_as_over_devices():
    x, module = rows(), BatchNorm(axis_name="d", use_running_average=False)
    variables = module.init(jax.random.key(0), x)  # no axis is bound here
    apply = functools.partial(module.apply, mutable=["batch_stats"])
    mapped = jax.vmap(apply, (None, 0), (0, None), axis_name="d")
    y, new = jax.jit(mapped)(variables, x.reshape(4, 4, 3))
    flat = functools.partial(
        module.clone(axis_name=None).apply, mutable=["batch_stats"]
    )
    right = jax.jit(flat)(variables, x)
    chex.assert_trees_all_close((y.reshape(16, 3), new), right, rtol=2e-6, atol=2e-6)


@pytest.mark.report(50)
def test_a_module_pools_over_two_nested_axes():
    x = jnp.arange(24.0).reshape(2, 3, 4, 1) ** 2
    options = {"use_running_average": False, "update_stats": False}
    module = BatchNorm(axis_name=("a", "b"), **options)
    variables = module.init(jax.random.key(0), x[0, 0])
    inner = jax.vmap(module.apply, (None, 0), axis_name="b")
    nested = jax.vmap(inner, (None, 0), axis_name="a")
    y = jax.jit(nested)(variables, x)
    right, _ = bnjax.batch_norm(x.reshape(24, 1), bnjax.init_batch_stats(1))
    np.testing.assert_allclose(y.reshape(24, 1), right, rtol=1e-5, atol=1e-6)


class NormRelu(BatchNorm):
    """A layer with an activation of its own, which a converter might drop."""

    def __call__(self, x, **options):
        return nn.relu(super().__call__(x, **options))


@pytest.mark.report(61)
def test_a_layer_becomes_synchronized_by_an_argument_and_stays_what_it_is():
    x, alone = rows(), NormRelu(use_running_average=False)
    variables = alone.init(jax.random.key(0), x)
    shared = alone.clone(axis_name="d")
    apply, flat = (
        functools.partial(module.apply, mutable=["batch_stats"])
        for module in (shared, alone)
    )
    mapped = jax.jit(jax.vmap(apply, (None, 0), axis_name="d"))
    y, _ = mapped(variables, x.reshape(4, 4, 3))
    right, _ = jax.jit(flat)(variables, x)
    assert isinstance(shared, NormRelu)
    assert right.min() == 0
    np.testing.assert_allclose(y.reshape(16, 3), right, rtol=1e-5, atol=1e-6)


@pytest.mark.report(62)
def test_a_device_that_sits_out_is_masked_and_sums_all_the_same():
    """In `lax.cond` it would not, and the others would wait for it for ever."""

    def here(x):
        joins = jax.lax.axis_index("d") != 2
        y, _ = norm(x, START, mask=jnp.broadcast_to(joins, len(x)))
        return jnp.where(joins, y, x)

    mesh = jax.make_mesh((4,), ("d",))
    x = jax.device_put(rows(), NamedSharding(mesh, P("d")))
    mapped = jax.shard_map(here, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    y = jax.device_get(jax.jit(mapped)(x))
    joined = np.r_[0:8, 12:16]
    right, _ = bnjax.batch_norm(rows()[joined], START)
    np.testing.assert_allclose(y[joined], right, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[8:12], rows()[8:12])
