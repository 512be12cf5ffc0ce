"""The NNX module in models: modes, freezing, transforms; examples of docs/nnx.md."""

import functools
import operator
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_nnx import normal, stats
from test_readme import ROOT, run_examples

import bnjax
from bnjax.nnx import BatchNorm


def make(**options):
    return BatchNorm(3, rngs=nnx.Rngs(0), **{"momentum": 0.5, **options})


def untouched(layer):
    return not layer.mean[...].any() and bool((layer.var[...] == 1).all())


def after(*batches, momentum=0.5):
    """Running values, by the core, after a call on each of the batches."""
    move = functools.partial(bnjax.batch_norm, momentum=momentum)
    start = bnjax.init_batch_stats(batches[0].shape[-1])
    return functools.reduce(lambda old, x: move(x, old)[1], batches, start)._asdict()


def assert_close(tree, right):
    chex.assert_trees_all_close(tree, right, rtol=1e-5, atol=1e-6)


def test_train_and_eval_set_the_mode_of_every_layer():
    model = nnx.Sequential(make(), make())
    model.eval()
    model(normal())
    assert all(map(untouched, model.layers))
    model.train()
    model(normal())
    assert not any(map(untouched, model.layers))


@pytest.mark.report(69)
@pytest.mark.parametrize("of_module", [None, True, False])
@pytest.mark.parametrize("of_call", [True, False])
def test_the_flag_of_the_call_takes_precedence(of_module, of_call):
    layer = make(use_running_average=of_module)
    layer(normal(), use_running_average=of_call)
    assert untouched(layer) == of_call


def test_no_flag_at_all_is_an_error():
    with pytest.raises(ValueError, match="does not know whether it trains"):
        make(use_running_average=None)(normal())


def test_a_view_has_a_mode_of_its_own_and_the_same_variables():
    layer = make()
    view = nnx.view(layer, use_running_average=True)
    view(normal())
    assert untouched(layer)
    layer(normal())
    assert not untouched(view)


def test_update_stats_off_normalizes_with_the_batch_and_moves_nothing():
    layer = make()
    layer.set_attributes(BatchNorm, update_stats=False)
    y = layer(normal())
    assert untouched(layer)
    np.testing.assert_array_equal(y, make()(normal()))


def loss_of(layer, x):
    return (layer(x) ** 3).sum()


def test_frozen_at_a_learning_rate_of_0_nothing_changes():
    layer = nnx.view(make(), use_running_average=True)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.0), wrt=nnx.Param)
    before = layer(normal())
    for _ in range(3):
        optimizer.update(layer, nnx.grad(loss_of)(layer, normal()))
    np.testing.assert_array_equal(layer(normal()), before)


@pytest.mark.parametrize("shape", [(3,), (8, 3)], ids=["for all", "for each example"])
def test_scale_and_bias_of_the_call_replace_those_of_the_module(shape):
    x, scale, bias = normal(), normal(shape, seed=1), normal(shape, seed=2)
    layer = make(scale_init=nnx.initializers.normal())
    y = layer(x, scale=scale, bias=bias)
    plain = np.asarray(make(use_scale=False, use_bias=False)(x))
    assert_close(y, plain * np.asarray(scale) + np.asarray(bias))


def test_renorm_of_the_call_may_be_traced():
    x, limits = normal(), bnjax.Renorm(1.5, 0.5)

    @nnx.jit
    def run(layer, x, r_max, d_max):
        return layer(x, renorm=bnjax.Renorm(r_max, d_max))

    y = run(make(), x, jnp.float32(limits.r_max), jnp.float32(limits.d_max))
    assert_close(y, make(renorm=limits)(x))


def test_gradients_are_those_of_the_core_and_of_parameters_alone():
    x, layer = normal(), make()
    gradient = nnx.to_pure_dict(nnx.jit(nnx.grad(loss_of))(layer, x))

    def of_core(params):
        y, _ = bnjax.batch_norm(x, bnjax.init_batch_stats(3), **params)
        return (y**3).sum()

    params = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}
    assert_close(gradient, jax.jit(jax.grad(of_core))(params))
    assert_close(stats(layer), after(x))


def test_running_values_carry_no_gradient():
    def moved(x):
        layer = make()
        layer(x)
        return layer.mean[...].sum() + layer.var[...].sum()

    assert not jax.jit(jax.grad(moved))(normal()).any()


def test_remat_moves_the_running_values_once():
    layer, x = make(), normal()
    nnx.jit(nnx.grad(nnx.remat(loss_of)))(layer, x)
    assert_close(stats(layer), after(x))


def test_an_abstract_layer_takes_no_memory():
    abstract = nnx.eval_shape(make)
    leaves = jax.tree.leaves(nnx.state(abstract))
    assert [type(leaf) for leaf in leaves] == [jax.ShapeDtypeStruct] * 4


CLOSED_OVER = {
    "nnx.jit": lambda layer, x: nnx.jit(lambda x: layer(x))(x),
    "nnx.eval_shape": lambda layer, x: nnx.eval_shape(layer, x),
    "nnx.remat": lambda layer, x: nnx.remat(lambda x: layer(x))(x),
    "nnx.vmap": lambda layer, x: nnx.vmap(lambda x: layer(x))(x[None]),
    "jax.jit": lambda layer, x: jax.jit(layer)(x),
}


@pytest.mark.report(48)
@pytest.mark.parametrize("name", CLOSED_OVER)
def test_closing_over_a_layer_in_training_is_an_error_not_a_lost_update(name):
    with pytest.raises(TraceContextError, match="BatchStat"):
        CLOSED_OVER[name](make(), normal())


@pytest.mark.parametrize("option", ["use_running_average", "update_stats"])
@pytest.mark.parametrize("name", CLOSED_OVER)
def test_a_layer_that_moves_nothing_may_be_closed_over(name, option):
    y = CLOSED_OVER[name](make(**{option: option != "update_stats"}), normal())
    assert y.shape[-2:] == (8, 3)


def test_reference_variables_may_be_closed_over_in_training():
    with nnx.var_defaults(ref=True):
        layer = make()
    jax.jit(layer)(normal())
    assert_close(stats(layer), after(normal()))


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_agree_with_the_whole_batch(check_vma):
    x, mask, layer = normal(), jnp.arange(8) % 3 > 0, make(axis_name="i")
    graph, state = nnx.split(layer)

    def forward(state, x, mask):
        layer = nnx.merge(graph, state, copy=True)
        return layer(x, mask=mask), stats(layer)

    mesh, specs = Mesh(jax.devices(), "i"), (P(), P("i"), P("i"))
    mapped = jax.shard_map(
        forward, mesh=mesh, in_specs=specs, out_specs=specs[1::-1], check_vma=check_vma
    )
    whole = make()
    assert_close(jax.jit(mapped)(state, x, mask), (whole(x, mask=mask), stats(whole)))


def test_the_shard_map_of_nnx_takes_the_layer_itself():
    layer, x, mesh = make(axis_name="i"), normal(), Mesh(jax.devices(), "i")
    specs = {"in_specs": (P(), P("i")), "out_specs": P("i")}
    run = nnx.shard_map(lambda layer, x: layer(x), mesh=mesh, **specs)
    nnx.jit(run)(layer, x)
    assert_close(stats(layer), after(x))


def test_groups_of_devices_have_statistics_of_their_own():
    x, groups = normal().reshape(4, 2, 3), [[0, 1], [2, 3]]
    graph, state = nnx.split(make(axis_name="i", axis_index_groups=groups))

    def forward(state, x):
        layer = nnx.merge(graph, state, copy=True)
        layer(x)
        return stats(layer)

    found = jax.pmap(forward, axis_name="i", in_axes=(None, 0))(state, x)
    halves = [after(half) for half in x.reshape(2, 4, 3)]
    right = jax.tree.map(lambda *half: np.stack(half).repeat(2, axis=0), *halves)
    assert_close(found, right)


@pytest.fixture(scope="module")
def docs():
    """What the examples of the page define."""
    return types.SimpleNamespace(**run_examples(ROOT / "docs" / "nnx.md"))


def values(module):
    """All values of a module as NumPy arrays, which broadcast freely."""
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module)))


def assert_moved(norm, inputs):
    """Asserts that running values, of any number of layers, are those of inputs."""
    right = inputs.mean(-2), inputs.var(-2, ddof=1)
    assert_close((norm["mean"], norm["var"]), right)


def test_docs_a_network_trains_and_is_evaluated(docs):
    assert docs.losses[-1] < docs.losses[0] / 50
    assert docs.evaluation_loss < docs.losses[0] / 50


def test_docs_mapped_batches_are_one_batch(docs):
    net = values(docs.shared)
    assert_moved(net["norm"], docs.x @ net["hidden"]["kernel"])
    assert_close(docs.y_shared.reshape(32, 1), docs.y_sharded)


def test_docs_mapped_batches_move_running_values_of_their_own(docs):
    net = values(docs.apart)
    assert_moved(net["norm"], docs.parts @ net["hidden"]["kernel"])


def test_docs_an_ensemble_has_members_that_differ(docs):
    net = values(docs.ensemble)
    assert_moved(net["norm"], docs.parts @ net["hidden"]["kernel"])
    assert len(np.unique(net["hidden"]["kernel"], axis=0)) == 4


def test_docs_running_values_are_carried_through_a_scan(docs):
    net = values(docs.scanned)
    right = after(*(docs.parts @ net["hidden"]["kernel"]), momentum=0.9)
    assert_close(stats(docs.scanned.norm), right)


def test_docs_stacked_layers_are_those_of_a_loop(docs):
    graph, state = nnx.split(docs.blocks)
    x, net = docs.x, values(docs.blocks)
    for k in range(3):
        inputs = np.asarray(x @ net["linear"]["kernel"][k])
        assert_moved(jax.tree.map(operator.itemgetter(k), net["norm"]), inputs)
        block = nnx.merge(graph, jax.tree.map(operator.itemgetter(k), state))
        x = nnx.view(block, use_running_average=False)(x)
    assert_close(docs.y_blocks, x)


@pytest.mark.report(48)
def test_docs_split_parameters_have_the_gradient_of_the_model(docs):
    net = values(docs.model)
    assert_moved(net["norm"], docs.x @ net["hidden"]["kernel"])
    right = nnx.jit(nnx.grad(docs.squared_error))(docs.model, docs.x, docs.target)
    assert_close(*map(nnx.to_pure_dict, (docs.gradient, right)))


def test_docs_devices_normalize_one_batch(docs):
    net = values(docs.sharded)
    assert_moved(net["norm"], docs.x @ net["hidden"]["kernel"])


def test_docs_a_frozen_layer_stays_and_the_others_learn(docs):
    frozen, start = values(docs.frozen), values(docs.Net(nnx.Rngs(0)))
    chex.assert_trees_all_equal(frozen["norm"], start["norm"])
    assert (frozen["hidden"]["kernel"] != start["hidden"]["kernel"]).any()


def test_docs_a_domain_moves_its_own_running_values(docs):
    assert untouched(docs.domains.norms[0])
    assert_close(stats(docs.domains.norms[1]), after(docs.x, momentum=0.99))
    assert_close(docs.y_domain, bnjax.batch_norm(docs.x, bnjax.init_batch_stats(4))[0])
