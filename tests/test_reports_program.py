"""What users of other libraries reported about programs: evaluation, optimizers."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

import bnjax
from train import loop
from train.config import RUNS
from train.evaluation import Evaluation
from train.parallel import AXIS, make_mesh, replicated
from train.step import first_state
from train.workdir import CHECKPOINTS, Checkpoints

CONFIG = dataclasses.replace(RUNS["mnist_sigmoid_bn"], batch_size=8, num_steps=7)
first_state = functools.cache(first_state)


@functools.cache
def evaluation(num_devices):
    """Accuracy of a state over 101 digits, compiled once."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
    run = Evaluation(CONFIG, mesh)
    return functools.partial(run, split="test[:101]")


@pytest.mark.report(8)
@pytest.mark.parametrize("part", ["params", "batch_stats"])
def test_evaluation_uses_the_state_that_it_is_given(part):
    evaluate, state = evaluation(4), first_state(CONFIG)
    # Not by a constant, which the next layer's statistics would not notice.
    update = jax.tree.map(lambda v: v + 0.1 * jnp.cos(v + 1), getattr(state, part))
    losses = [
        evaluate(each, batch_size=10)["eval_loss"]
        for each in (state, state._replace(**{part: update}))
    ]
    assert abs(losses[1] - losses[0]) > 1e-3


@pytest.mark.report(52)
def test_101_examples_on_four_devices_count_once_each():
    state = first_state(CONFIG)
    padded = evaluation(4)(state, batch_size=10)
    whole = evaluation(1)(state, batch_size=101)
    assert padded["count"] == 101
    assert padded == pytest.approx(whole, rel=1e-6)


@pytest.mark.report(31)
def test_a_checkpoint_without_running_values_is_an_error(tmp_path):
    state = first_state(CONFIG)
    with ocp.CheckpointManager((tmp_path / CHECKPOINTS).absolute()) as manager:
        lost = {**state._asdict(), "batch_stats": {}}
        manager.save(1, args=ocp.args.StandardSave(lost))
    with (
        Checkpoints(tmp_path, read_only=True) as checkpoints,
        pytest.raises(ValueError, match="batch_stats"),
    ):
        checkpoints.restore(CONFIG, 1, replicated(make_mesh()))


@pytest.mark.report(37)
def test_a_hundred_steps_of_decay_shrink_kernels_alone():
    one = jnp.ones(())
    params = {"dense": {"kernel": one, "bias": one}, "bn": {"scale": one, "bias": one}}
    optimizer = optax.adamw(0.1, weight_decay=0.1, mask=bnjax.weight_decay_mask)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step(_, carry):
        params, state = carry
        updates, state = optimizer.update(zeros, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):  # Adam asks for it
        params, _ = jax.lax.fori_loop(0, 100, step, (params, optimizer.init(params)))
    assert params["bn"] == {"scale": 1, "bias": 1}
    np.testing.assert_allclose(params["dense"]["kernel"], 0.36603, rtol=1e-5)


@pytest.mark.report(46)
@pytest.mark.parametrize(("step", "warns"), [(29, True), (31, False)])
def test_an_evaluation_before_the_running_values_have_arrived_says_so(
    monkeypatch, step, warns
):
    config, said = dataclasses.replace(CONFIG, num_steps=step, bn_momentum=0.9), []
    result = {"accuracy": 0.5, "count": 10}
    monkeypatch.setattr(loop, "Evaluation", lambda *_: lambda state: result)
    recorder = types.SimpleNamespace(say=said.append, write=lambda *_, **__: None)
    run = loop.Run(config, make_mesh(), None, recorder, None)
    run.until_the_end(types.SimpleNamespace(step=step), owed=True)
    assert any("they take 30 steps" in line for line in said) == warns
