import json

import jax
import numpy as np
import pytest

from train import figure1
from train.config import RUNS, RunError
from train.data import DataError
from train.figure1 import Report, compare, load_digits, run_figure1
from train.plot import plot_figure1
from train.step import first_state
from train.workdir import claim_workdir, read_records

OPTIONS = {"dataset": "mnist_subset", "data_dir": None, "seed": 0}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("figure") / "figure1"
    return workdir, run_figure1(**OPTIONS, num_steps=1000, workdir=workdir)


def of(records, network):
    return [record for record in records if record["network"] == network]


# Records


@pytest.mark.parametrize("network", ["without BN", "with BN"])
def test_there_is_a_record_before_training_and_after_each_500_steps(drawn, network):
    records = of(drawn[1], network)
    assert [record["step"] for record in records] == [0, 500, 1000]
    assert ["loss" in record for record in records] == [False, True, True]


def test_every_record_is_of_all_test_digits(drawn):
    assert {record["count"] for record in drawn[1]} == {2000}


def test_percentiles_rise(drawn):
    for record in drawn[1]:
        low, middle, high = record["percentiles"]
        assert low < middle < high


def test_the_records_are_on_disk(drawn):
    assert read_records(drawn[0]) == drawn[1]


def test_the_batch_normalized_network_leads(drawn):
    without, with_bn = (of(drawn[1], name)[-1] for name in figure1.NETWORKS)
    assert with_bn["accuracy"] > 0.85 > without["accuracy"]


def test_what_is_looked_at_is_the_input_of_the_last_sigmoids():
    config = RUNS["mnist_sigmoid"]
    state = first_state(config)
    images = load_digits(config)["test_images"][:50]
    data = {"test_images": images, "test_labels": np.zeros(50, np.int32)}
    _, percentiles = jax.jit(figure1.make_look(config))(state, data)
    x = np.float64(images).reshape(50, -1) / 127.5 - 1
    for name in ("hidden_1", "hidden_2", "hidden_3"):
        layer = jax.tree.map(np.float64, state.params[name])
        u = x @ layer["kernel"] + layer["bias"]
        x = 1 / (1 + np.exp(-u))
    expected = np.percentile(u[:, figure1.UNIT], [15, 50, 85])
    np.testing.assert_allclose(percentiles, expected, rtol=1e-4, atol=1e-5)


# The workdir


def test_a_finished_figure_is_drawn_again_without_training(drawn, monkeypatch):
    workdir, records = drawn
    (workdir / "figure1.png").unlink()
    monkeypatch.setattr(figure1, "train_network", None)
    assert run_figure1(**OPTIONS, num_steps=1000, workdir=workdir) == records
    assert (workdir / "figure1.png").read_bytes().startswith(b"\x89PNG")


def test_an_unfinished_figure_begins_again(tmp_path, monkeypatch):
    def train_network(config, data):
        for step in (0, 500):
            yield Report(step, None, {"correct": 1, "count": 2}, [0, 1, 2])

    monkeypatch.setattr(figure1, "train_network", train_network)
    monkeypatch.setattr(figure1, "load_digits", lambda config: {})
    run_figure1(**OPTIONS, num_steps=500, workdir=tmp_path)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    run_figure1(**OPTIONS, num_steps=500, workdir=tmp_path)
    assert path.read_text() == whole


def test_a_loss_that_is_not_finite_ends_the_figure(tmp_path, monkeypatch):
    def diverge(config, data):
        for step, loss in ((0, None), (500, np.float32(2)), (1000, np.float32("nan"))):
            yield Report(step, loss, {"count": 10, "correct": 1}, np.zeros(3))
        raise AssertionError("the training went on")

    monkeypatch.setattr(figure1, "train_network", diverge)
    with pytest.raises(RunError, match="the loss is nan in the 500 steps before step"):
        run_figure1(**OPTIONS, num_steps=1500, workdir=tmp_path)


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_steps": 1500}])
def test_another_figure_does_not_get_the_workdir(drawn, change):
    options = {**OPTIONS, "num_steps": 1000, **change}
    with pytest.raises(RunError, match="holds another run"):
        run_figure1(**options, workdir=drawn[0])


def test_the_workdir_of_a_fit_stays_as_it_is(tmp_path):
    claim_workdir(tmp_path, RUNS["mnist_sigmoid_bn"])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(RunError, match=r"figure1\.json is missing"):
        run_figure1(**OPTIONS, num_steps=50_000, workdir=tmp_path)
    assert read_records(tmp_path) == [{"step": 1}]


def test_missing_data_leave_no_workdir(tmp_path):
    options = {"dataset": "mnist", "data_dir": str(tmp_path / "no"), "seed": 0}
    with pytest.raises(DataError, match="mnist is not in"):
        run_figure1(**options, num_steps=500, workdir=tmp_path / "figure")
    assert not (tmp_path / "figure").exists()


# What is shown


def records_until(last):
    return [
        {
            "network": network,
            "step": step,
            "accuracy": accuracy,
            "count": 2000,
            "percentiles": [-1.0 - accuracy, 0.0, 1.0 + step],
        }
        for network, accuracy in (("without BN", 0.5), ("with BN", 0.75))
        for step in range(0, last + 1, 500)
    ]


@pytest.mark.parametrize(
    ("last", "steps"),
    [
        (1000, [1000]),
        (2000, [2000]),
        (2500, [2000, 2500]),
        (50_000, [2000, 10_000, 50_000]),
    ],
)
def test_the_table_has_the_milestones_and_the_end(last, steps):
    title, header, *rows = compare(records_until(last)).splitlines()
    assert title == "test accuracy (%), 2000 digits"
    assert header.split() == ["steps", "without", "BN", "with", "BN"]
    assert [row.split() for row in rows] == [[str(s), "50.00", "75.00"] for s in steps]


@pytest.fixture(scope="module")
def figure():
    return plot_figure1(records_until(1000), "a caption")


@pytest.mark.parametrize(
    ("panel", "title", "label"),
    [
        (0, "(a) test accuracy", "test accuracy (%)"),
        (1, "(b) without BN", "input of the sigmoid"),
        (2, "(c) with BN", "input of the sigmoid"),
    ],
)
def test_a_panel_says_what_it_shows(figure, panel, title, label):
    axes = figure.axes[panel]
    assert axes.get_title() == title
    assert axes.get_ylabel() == label
    assert axes.get_xlabel() == "training step"


def test_panel_a_shows_both_accuracies(figure):
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines) == ["without BN", "with BN"]
    for name, percent in (("without BN", 50), ("with BN", 75)):
        np.testing.assert_array_equal(lines[name].get_xdata(), [0, 500, 1000])
        np.testing.assert_array_equal(lines[name].get_ydata(), [percent] * 3)
    assert len({line.get_linestyle() for line in lines.values()}) == 2


@pytest.mark.parametrize(("panel", "accuracy"), [(1, 0.5), (2, 0.75)])
def test_panels_b_and_c_show_three_percentiles(figure, panel, accuracy):
    lines = {line.get_label(): line for line in figure.axes[panel].lines}
    expected = {
        "15th percentile": [-1 - accuracy] * 3,
        "50th percentile": [0, 0, 0],
        "85th percentile": [1, 501, 1001],
    }
    assert set(lines) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(lines[name].get_ydata(), values)
    assert len({line.get_linestyle() for line in lines.values()}) == 3


def test_panels_b_and_c_have_one_scale(figure):
    assert figure.axes[1].get_ylim() == figure.axes[2].get_ylim()


def test_the_caption_is_below(figure):
    assert figure.get_supxlabel() == "a caption"


def test_the_caption_says_what_was_trained():
    text = figure1.caption(RUNS["mnist_sigmoid_bn"])
    assert "mnist_subset" in text
    assert "batches of 60, learning rate 0.1, seed 0" in text


@pytest.mark.parametrize(("step", "text"), [(0, "0"), (500, "0.5k"), (20_000, "20k")])
def test_steps_are_written_in_thousands(figure, step, text):
    assert figure.axes[0].xaxis.get_major_formatter()(step, None) == text
