"""Runs of the program as a user starts them, in processes of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from train.parallel import make_mesh, replicated
from train.workdir import Checkpoints, read_config, read_records

pytestmark = pytest.mark.slow

TIMEOUT = 200  # seconds; several times what a run takes
DIGITS = ["mnist_sigmoid_bn", "--num-steps", "2000", "--checkpoint-every", "500"]
DIGITS += ["--log-every", "50", "--eval-every", "1000"]
FEW = ["mnist_sigmoid_bn", "--num-steps", "20", "--log-every", "1"]
FEW += ["--checkpoint-every", "10", "--eval-every", "10"]
INCEPTION = ["bn_x5", "--dataset", "mnist_subset", "--width", "0.125"]
INCEPTION += ["--dropout-rate", "0.2", "--batch-size", "16", "--num-steps", "20"]
# In float32 the rounding of the first step, 1e-7, is 1e-3 of the loss by the 20th: a
# network that learns fast forgets where it began, on one device too.
INCEPTION += ["--log-every", "1", "--dtype", "float64"]


@contextlib.contextmanager
def fit(*arguments, workdir, devices=1, **settings):
    """Starts `python -m train fit`; kills it should it outlive the test."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **settings}
    command = [sys.executable, "-m", "train", "fit", *arguments]
    process = subprocess.Popen(
        [*command, "--workdir", str(workdir)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def fit_to_the_end(*arguments, **options):
    with fit(*arguments, **options) as process:
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    return out


def wait_for_step(workdir, step, process):
    """Returns once a line of a later step than `step` is on disk."""
    deadline = time.monotonic() + TIMEOUT
    while not any(record["step"] > step for record in read_records(workdir)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def last_state(workdir):
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.latest_step()
        sharding = replicated(make_mesh())
        state = checkpoints.restore(read_config(workdir), step, sharding)
    return jax.device_get(state)


def assert_same_state(workdir, other):
    jax.tree.map(np.testing.assert_array_equal, last_state(workdir), last_state(other))


# Killed


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    fit_to_the_end(*DIGITS, workdir=workdir)
    return workdir


def test_a_killed_run_ends_as_an_unbroken_one(unbroken, tmp_path):
    workdir = tmp_path / "run"
    with fit(*DIGITS, workdir=workdir) as process:
        wait_for_step(workdir, 1150, process)
        process.kill()
        assert process.wait(TIMEOUT) == -signal.SIGKILL
    assert f"goes on from step 1000 in {workdir}" in fit_to_the_end(
        *DIGITS, workdir=workdir
    )
    assert_same_state(workdir, unbroken)
    assert read_records(workdir) == read_records(unbroken)


def test_a_terminated_run_saves_and_ends_as_an_unbroken_one(unbroken, tmp_path):
    workdir = tmp_path / "run"
    with fit(*DIGITS, workdir=workdir) as process:
        wait_for_step(workdir, 600, process)
        process.terminate()
        _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143
    stopped = int(last_state(workdir).step)
    assert stopped % 500
    assert f"Stopped after step {stopped}, which is saved." in err
    assert f"goes on from step {stopped} in" in fit_to_the_end(*DIGITS, workdir=workdir)
    assert_same_state(workdir, unbroken)


# Several processes


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def fit_in_two_processes(*arguments, workdir):
    """Starts two processes of two devices each."""
    address = f"localhost:{free_port()}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    options = {"workdir": workdir, "devices": 2, **common}
    arguments = [*arguments, "--multi-process"]
    with (
        fit(*arguments, JAX_PROCESS_ID="0", **options) as first,
        fit(*arguments, JAX_PROCESS_ID="1", **options) as second,
    ):
        yield first, second


def test_two_processes_train_as_one(tmp_path):
    workdir = tmp_path / "run"
    with fit_in_two_processes(*FEW, workdir=workdir) as processes:
        results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert "step 20: accuracy" in results[0][0]
    assert "step 20" not in results[1][0]
    fit_to_the_end(*FEW, workdir=tmp_path / "one", devices=4)
    assert_records_agree(workdir, tmp_path / "one", rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        last_state(workdir),
        last_state(tmp_path / "one"),
    )


def test_two_processes_of_which_one_is_terminated_save_and_stop(tmp_path):
    workdir = tmp_path / "run"
    arguments = ["mnist_sigmoid_bn", "--log-every", "1", "--num-steps", "30000"]
    with fit_in_two_processes(*arguments, workdir=workdir) as processes:
        wait_for_step(workdir, 5, processes[0])
        processes[1].terminate()
        results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [143, 143], results
    stopped = int(last_state(workdir).step)
    assert f"Stopped after step {stopped}, which is saved." in results[0][1]


def assert_records_agree(workdir, other, *, rtol):
    """Asserts the same lines, none twice, with the same numbers but for rounding."""
    lines, others = read_records(workdir), read_records(other)
    assert [line.keys() for line in lines] == [line.keys() for line in others]
    for line, expected in zip(lines, others, strict=True):
        np.testing.assert_allclose(
            list(line.values()), list(expected.values()), rtol=rtol
        )


@pytest.mark.parametrize("devices", [1, 4])
def test_evaluation_says_nothing_but_its_result(devices, unbroken):
    command = [sys.executable, "-m", "train", "evaluate", str(unbroken)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    options = ["--split", "train[:17]", "--batch-size", "4"]
    done = subprocess.run(
        [*command, *options], env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.stdout.startswith("step 2000: top-1 error ")
    assert done.stdout.endswith(", n = 17\n")
    assert done.stderr == ""


# Inception: dropout, augmentation and synchronized statistics


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    fit_to_the_end(*INCEPTION, workdir=workdir, JAX_ENABLE_X64="1")
    return workdir


def test_microbatches_over_devices_are_those_of_one_device(tmp_path):
    options = [*FEW, "--batch-size", "64", "--accumulate", "4"]
    for devices in (1, 4):
        fit_to_the_end(*options, workdir=tmp_path / str(devices), devices=devices)
    assert_records_agree(tmp_path / "1", tmp_path / "4", rtol=1e-5)


@pytest.mark.parametrize("parallel", ["shard_map", "pmap"])
def test_inception_trains_on_four_devices_as_on_one(parallel, alone, tmp_path):
    workdir = tmp_path / "run"
    fit_to_the_end(
        *INCEPTION,
        *("--parallel", parallel),
        workdir=workdir,
        devices=4,
        JAX_ENABLE_X64="1",
    )
    assert_records_agree(workdir, alone, rtol=1e-8)
    with jax.enable_x64(True):
        state, expected = last_state(workdir), last_state(alone)
    chex.assert_trees_all_close(state.params, expected.params, rtol=1e-6, atol=1e-9)
    # Running values are float32.
    chex.assert_trees_all_close(
        state.batch_stats, expected.batch_stats, rtol=1e-6, atol=1e-7
    )
