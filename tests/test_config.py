import dataclasses
import json

import pytest

from train.config import IMAGENET_BATCHES, RUNS, Config, RunError, from_dict

FIGURE_2 = ["inception", "bn_baseline", "bn_x5", "bn_x30", "bn_x5_sigmoid"]
OTHERS = ["inception_x5", "inception_sigmoid"]
BASELINES = ["inception", "bn_baseline", *OTHERS]
ACCELERATED = ["bn_x5", "bn_x30", "bn_x5_sigmoid"]


def test_there_are_the_runs_of_the_contract_and_no_others():
    assert set(RUNS) == {"mnist_sigmoid", "mnist_sigmoid_bn", *FIGURE_2, *OTHERS}


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("inception", 0.0015),
        ("bn_baseline", 0.0015),
        ("bn_x5", 0.0075),
        ("bn_x30", 0.045),
        ("bn_x5_sigmoid", 0.0075),
        ("inception_x5", 0.0075),
        ("inception_sigmoid", 0.0015),
    ],
)
def test_a_run_has_the_learning_rate_of_the_paper(name, rate):
    assert RUNS[name].learning_rate == pytest.approx(rate)


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_called_bn_are_the_normalized_ones(name):
    assert RUNS[name].batch_norm == ("bn" in name)


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_called_sigmoid_have_sigmoids(name):
    assert RUNS[name].activation == ("sigmoid" if "sigmoid" in name else "relu")


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_has_what_the_paper_takes_away(name):
    run = RUNS[name]
    assert run.dropout_rate == 0.4
    assert run.local_response_norm
    assert run.photometric == "full"


@pytest.mark.parametrize("name", ACCELERATED)
def test_an_accelerated_run_has_the_changes_of_section_4_2_1(name):
    run, baseline = RUNS[name], RUNS["bn_baseline"]
    assert run.dropout_rate == 0
    assert not run.local_response_norm
    assert run.photometric == "weak"
    assert run.weight_decay == pytest.approx(baseline.weight_decay / 5)
    assert run.decay_steps == pytest.approx(baseline.decay_steps / 6, rel=1e-3)


def test_bn_baseline_is_inception_with_batch_norm_alone():
    inception = dataclasses.replace(RUNS["inception"], batch_norm=True)
    steps = RUNS["bn_baseline"].num_steps
    assert dataclasses.replace(inception, num_steps=steps) == RUNS["bn_baseline"]


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_has_the_optimizer_of_googlenet(name):
    run = RUNS[name]
    assert (run.sgd_momentum, run.decay_rate, run.batch_size) == (0.9, 0.96, 32)
    assert run.decay_steps == pytest.approx(8 * IMAGENET_BATCHES, abs=1)


@pytest.mark.parametrize("name", ["mnist_sigmoid", "mnist_sigmoid_bn"])
def test_the_runs_of_section_4_1_are_plain_sgd_on_digits(name):
    run = RUNS[name]
    assert (run.model, run.dataset) == ("mlp", "mnist_subset")
    assert (run.batch_size, run.num_steps) == (60, 50_000)
    assert run.sgd_momentum == run.weight_decay == 0
    assert run.decay_rate == 1


@pytest.mark.parametrize("name", RUNS)
def test_a_config_survives_json(name):
    saved = json.dumps(dataclasses.asdict(RUNS[name]))
    assert from_dict(json.loads(saved)) == RUNS[name]


def test_an_unknown_field_is_an_error_that_lists_the_fields():
    with pytest.raises(RunError, match=r"no fields \['widht'\]\. Fields: .*width") as e:
        from_dict({"widht": 1})
    assert all(field.name in str(e.value) for field in dataclasses.fields(Config))


def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUNS["inception"].width = 2.0


@pytest.mark.parametrize(
    "name",
    [
        "batch_size",
        "num_steps",
        "width",
        "decay_rate",
        "decay_steps",
        "image_size",
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_what_must_be_positive_is_checked(name, value):
    with pytest.raises(RunError, match=f"^{name}={value} must be more than 0.$"):
        Config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", -0.1, "at least 0"),
        ("weight_decay", -1e-4, "at least 0"),
        ("num_workers", -1, "at least 0"),
        ("seed", -1, "at least 0"),
        ("bn_momentum", 1.5, r"in \[0, 1\]"),
        ("sgd_momentum", -0.5, r"in \[0, 1\]"),
        ("dropout_rate", 1.0, r"in \[0, 1\)"),
        ("dropout_rate", -0.1, r"in \[0, 1\)"),
        ("learning_rate", float("inf"), "finite"),
        ("learning_rate", float("nan"), "finite"),
        ("width", float("inf"), "finite"),
    ],
)
def test_a_value_that_no_run_can_have_is_an_error(name, value, allowed):
    with pytest.raises(RunError, match=f"^{name}={value} must be {allowed}.$"):
        Config(**{name: value})
