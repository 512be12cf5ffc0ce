import os
import subprocess
import sys

import jax
import pytest

from train import demo, parallel
from train.config import RUNS, RunError

OPTIONS = {"dataset": "mnist_subset", "data_dir": None, "seed": 5}
OPTIONS |= {"num_steps": 500, "network_steps": 20}


@pytest.fixture
def trained(monkeypatch):
    """What `train` is called with, in place of training."""
    calls = []

    def train(config, workdir, *, name):
        calls.append((name, config, workdir))
        return {"accuracy": 0.5 if name == "inception" else 0.875}

    monkeypatch.setattr(demo, "train", train)
    return calls


def test_both_networks_are_trained_in_small_on_the_digits(trained, tmp_path):
    demo.run_demo(only="networks", **OPTIONS, workdir=tmp_path)
    assert [(name, workdir) for name, _, workdir in trained] == [
        ("inception", tmp_path / "inception"),
        ("bn_x5", tmp_path / "bn_x5"),
    ]
    for _, config, _ in trained:
        assert (config.dataset, config.num_steps, config.seed) == (
            "mnist_subset",
            20,
            5,
        )
        assert config.width == 0.125
        assert config.batch_size % jax.device_count() == 0


@pytest.mark.parametrize("name", ["inception", "bn_x5"])
def test_in_small_a_run_keeps_what_the_paper_compares(name):
    config = demo.small(RUNS[name], "mnist_subset", None, 20, 0)
    kept = ("batch_norm", "learning_rate", "dropout_rate", "local_response_norm")
    kept += ("weight_decay", "sgd_momentum", "activation", "model")
    assert [getattr(config, k) for k in kept] == [getattr(RUNS[name], k) for k in kept]


@pytest.mark.parametrize(("devices", "batch"), [(1, 64), (3, 66), (4, 64), (7, 70)])
def test_a_batch_in_small_divides_over_any_devices(devices, batch, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    config = demo.small(RUNS["bn_x5"], "mnist_subset", None, 20, 0)
    assert config.batch_size == batch


def test_what_is_wrong_with_the_networks_is_said_before_the_figure(monkeypatch):
    monkeypatch.setattr(demo, "run_figure1", None)
    with pytest.raises(RunError, match="num_steps=0 must be more than 0"):
        demo.run_demo(only=None, workdir=None, **{**OPTIONS, "network_steps": 0})


def test_accuracies_stand_side_by_side(trained, tmp_path, capsys):
    demo.run_demo(only="networks", **OPTIONS, workdir=tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        "test accuracy (%) after 20 steps on 4 cpu devices",
        "   inception   50.00",
        "       bn_x5   87.50",
    ]


@pytest.mark.parametrize(
    ("only", "parts"),
    [
        (None, ["figure1", "networks"]),
        ("figure1", ["figure1"]),
        ("networks", ["networks"]),
    ],
)
def test_each_part_can_be_run_alone(only, parts, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(demo, "run_figure1", lambda **_: ran.append("figure1"))
    monkeypatch.setattr(demo, "run_networks", lambda *_: ran.append("networks"))
    demo.run_demo(only=only, **OPTIONS, workdir=tmp_path)
    assert ran == parts


def test_devices_that_were_chosen_stay(monkeypatch):
    monkeypatch.setattr(parallel, "SIMULATED_DEVICES", 3)
    parallel.simulate_devices()
    assert jax.config.jax_num_cpu_devices == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 4),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, 2),
        ({"JAX_NUM_CPU_DEVICES": "1"}, 1),
    ],
    ids=["nothing", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"],
)
def test_a_lone_cpu_becomes_four_devices_unless_told_otherwise(settings, count):
    code = (
        "import jax; from train.parallel import simulate_devices; simulate_devices(); "
        "print(jax.device_count())"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **settings}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=120
    )
    assert int(done.stdout) == count
