import dataclasses
import signal

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from train import evaluation, loop
from train.config import RUNS, RunError
from train.data import DATASETS, DataError, load_arrays
from train.evaluation import Evaluation, evaluate
from train.loop import Diverged, train
from train.parallel import make_mesh, replicated
from train.stop import Interrupted
from train.workdir import Checkpoints, read_config, read_records

CONFIG = dataclasses.replace(
    RUNS["mnist_sigmoid_bn"],
    batch_size=8,
    num_steps=7,
    sgd_momentum=0.9,
    log_every=2,
    eval_every=3,
    checkpoint_every=2,
    keep=10,
)


class PowerCut(Exception):
    """Ends a run without warning."""


@pytest.fixture(scope="module", autouse=True)
def few_digits(tmp_path_factory):
    """200 + 17 digits are enough, and so is compiling each program once."""
    digits = DATASETS["mnist_subset"]._replace(
        train_split="train[:200]", eval_split="test[:17]"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATASETS, "mnist_subset", digits)
        jax.config.update(
            "jax_compilation_cache_dir", str(tmp_path_factory.mktemp("c"))
        )
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        compilation_cache.reset_cache()
        yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1)
    compilation_cache.reset_cache()


def train_until_power_cut(config, workdir, *, batches):
    """Trains with a stream that breaks; what was not saved by then is lost."""

    def broken(*args, **kwargs):
        whole = real(*args, **kwargs)
        for _ in range(batches):
            yield next(whole)
        raise PowerCut

    real = loop.train_batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_batches", broken)
        with pytest.raises(PowerCut):
            train(config, workdir)


def last_state(workdir):
    config = read_config(workdir)
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.latest_step()
        return jax.device_get(
            checkpoints.restore(config, step, replicated(make_mesh()))
        )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    return workdir, train(CONFIG, workdir)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that went on from step 2 after it had reported step 3."""
    workdir = tmp_path_factory.mktemp("resumed") / "run"
    train_until_power_cut(CONFIG, workdir, batches=3)
    return workdir, train(CONFIG, workdir)


# Records


def test_the_workdir_holds_the_config(unbroken):
    assert read_config(unbroken[0]) == CONFIG


def test_each_report_is_a_line(unbroken):
    records = read_records(unbroken[0])
    # Every 2 steps, where something else happens, and at the end.
    assert [r["step"] for r in records if "loss" in r] == [2, 3, 4, 6, 7]
    assert [r["step"] for r in records if "accuracy" in r] == [3, 6, 7]


def test_the_lines_hold_what_the_contract_says(unbroken):
    for record in read_records(unbroken[0]):
        if "accuracy" in record:
            assert record["count"] == 17
            assert 0 <= record["accuracy"] <= record["accuracy_top5"] <= 1
        else:
            assert 0 < record["loss"] < 10
            assert 0 <= record["train_accuracy"] <= 1


def test_train_returns_the_last_evaluation(unbroken):
    workdir, result = unbroken
    assert read_records(workdir)[-1] == {"step": 7, **result}


def test_the_last_checkpoint_is_the_end(unbroken):
    state = last_state(unbroken[0])
    assert (state.step, state.position) == (7, 7 * 8)


def test_evaluate_gives_what_training_gave(unbroken):
    workdir, result = unbroken
    step, again = evaluate(workdir)
    assert (step, again) == (7, result)


@pytest.mark.parametrize(("split", "batch_size", "n"), [("train[:5]", 3, 5)])
def test_evaluate_takes_another_split_and_batch(unbroken, split, batch_size, n):
    _, result = evaluate(unbroken[0], split=split, batch_size=batch_size)
    assert result["count"] == n


def test_evaluate_rejects_an_impossible_batch(unbroken):
    with pytest.raises(RunError, match="batch_size=-4 must be more than 0"):
        evaluate(unbroken[0], batch_size=-4)


# Going on


@pytest.mark.report(31)
def test_a_resumed_run_ends_in_the_state_of_an_unbroken_one(unbroken, resumed):
    jax.tree.map(
        np.testing.assert_array_equal, last_state(resumed[0]), last_state(unbroken[0])
    )


def test_a_resumed_run_leaves_the_lines_of_an_unbroken_one(unbroken, resumed):
    assert read_records(resumed[0]) == read_records(unbroken[0])


def test_a_resumed_run_does_not_begin_again(tmp_path, capsys):
    train_until_power_cut(CONFIG, tmp_path, batches=3)
    train_until_power_cut(CONFIG, tmp_path, batches=0)
    assert f"goes on from step 2 in {tmp_path}" in capsys.readouterr().out


def test_a_finished_run_is_only_evaluated(unbroken, monkeypatch):
    workdir, result = unbroken
    before = (workdir / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(loop, "train_batches", None)
    assert train(CONFIG, workdir) == result
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_sigterm_saves_the_step_and_stops(tmp_path, monkeypatch):
    def raising(*args, **kwargs):
        for step, batch in enumerate(real(*args, **kwargs), start=1):
            if step == 3:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    real = loop.train_batches
    monkeypatch.setattr(loop, "train_batches", raising)
    with pytest.raises(Interrupted, match="Stopped after step 3, which is saved"):
        train(CONFIG, tmp_path)
    assert last_state(tmp_path).step == 3
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_step_whose_evaluation_fails_is_saved_all_the_same(tmp_path):
    def fail(*_):
        raise DataError("picture 3 is unreadable")

    config = dataclasses.replace(CONFIG, eval_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Evaluation, "__call__", fail)
        with pytest.raises(DataError, match="picture 3"):
            train(config, tmp_path)
    assert last_state(tmp_path).step == 2
    train(config, tmp_path)  # owes the evaluation, and goes on
    evaluated = [r["step"] for r in read_records(tmp_path) if "accuracy" in r]
    assert evaluated == [2, 4, 6, 7]


def test_a_stop_amid_an_evaluation_saves_the_step(tmp_path, monkeypatch):
    def raising(*args, **kwargs):
        for number, batch in enumerate(real(*args, **kwargs)):
            if number == 1:
                signal.raise_signal(signal.SIGTERM)
            yield batch
            assert number < 1, "the evaluation went on"

    real = evaluation.eval_batches
    monkeypatch.setattr(evaluation, "eval_batches", raising)
    with pytest.raises(Interrupted, match="after step 3"):
        train(CONFIG, tmp_path)
    assert last_state(tmp_path).step == 3
    assert not any("accuracy" in record for record in read_records(tmp_path))


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=0 there and 1 here"),
        ({"learning_rate": 0.5}, "learning_rate=0.1 there and 0.5 here"),
        ({"batch_size": 16}, "batch_size=8 there and 16 here"),
    ],
    ids=["seed", "learning_rate", "batch_size"],
)
def test_another_run_does_not_get_the_workdir(unbroken, change, message):
    with pytest.raises(RunError, match=f"holds another run: {message}"):
        train(dataclasses.replace(CONFIG, **change), unbroken[0])
    assert read_config(unbroken[0]) == CONFIG


def test_a_batch_that_does_not_divide_leaves_no_workdir(tmp_path):
    config = dataclasses.replace(CONFIG, batch_size=6)
    with pytest.raises(RunError, match=r"batch_size=6 .* 4 devices"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_data_leave_no_workdir(tmp_path):
    config = dataclasses.replace(
        CONFIG, dataset="mnist", data_dir=str(tmp_path / "data")
    )
    with pytest.raises(DataError, match="mnist is not in"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_evaluate_needs_a_checkpoint(tmp_path):
    train_until_power_cut(CONFIG, tmp_path, batches=0)
    with pytest.raises(RunError, match="has no checkpoint yet"):
        evaluate(tmp_path)


# Divergence


def test_a_loss_that_is_not_finite_stops_with_its_step(tmp_path):
    config = dataclasses.replace(
        CONFIG, batch_norm=False, learning_rate=1e38, checkpoint_every=1, log_every=10
    )
    with pytest.raises(Diverged, match=r"^Not finite at step (\d+): loss"):
        train(config, tmp_path)
    state = last_state(tmp_path)
    assert state.step >= 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


# Evaluation


def evaluate_in_numpy(state, images, labels):
    """Returns accuracy, accuracy of the best five, and mean loss, in float64."""
    params, stats = (
        jax.tree.map(np.float64, t) for t in (state.params, state.batch_stats)
    )
    x = images.reshape(len(images), -1) / 127.5 - 1
    for layer in ("hidden_1", "hidden_2", "hidden_3"):
        bn, seen = params[f"{layer}_bn"], stats[f"{layer}_bn"]
        x = x @ params[layer]["kernel"] - seen["mean"]
        x = bn["scale"] * x / np.sqrt(seen["var"] + 1e-5) + bn["bias"]
        x = 1 / (1 + np.exp(-x))
    x = x @ params["output"]["kernel"] + params["output"]["bias"]
    ranks = (x > x[np.arange(len(x)), labels][:, None]).sum(-1)
    losses = np.log(np.exp(x).sum(-1)) - x[np.arange(len(x)), labels]
    return (ranks == 0).mean(), (ranks < 5).mean(), losses.mean()


@pytest.mark.report(52)
def test_evaluation_is_the_mean_over_every_example_once(unbroken):
    state = last_state(unbroken[0])
    result = Evaluation(CONFIG, make_mesh())(state, batch_size=4)
    images, labels = load_arrays("mnist_subset", split="test[:17]")
    top1, top5, loss = evaluate_in_numpy(jax.device_get(state), images, labels)
    assert result["count"] == 17
    assert (result["accuracy"], result["accuracy_top5"]) == (top1, top5)
    np.testing.assert_allclose(result["eval_loss"], loss, rtol=1e-5)
