import sys

import jax
import pytest

from train import __main__ as program
from train import evaluation, loop
from train.config import RUNS
from train.stop import Interrupted

RESULT = {"accuracy": 0.75, "accuracy_top5": 0.9, "eval_loss": 1.0, "count": 17}


@pytest.fixture
def calls(monkeypatch):
    """What `train` is called with, in place of training."""
    seen = []

    def train(config, workdir, *, name):
        seen.append((config, str(workdir), name))
        return RESULT

    monkeypatch.setattr(loop, "train", train)
    return seen


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("paint", "There is no command 'paint'. Commands: fit, evaluate, figure."),
        ("fit", "There is no run ''. Runs: mnist_sigmoid, mnist_sigmoid_bn, "),
        ("fit vgg", "There is no run 'vgg'. Runs: mnist_sigmoid, mnist_sigmoid_bn, "),
        ("fit bn_x5 --widht 2", "--widht, 2. Fields of a run: model, batch_norm, "),
        ("fit bn_x5 --width", "Missing value for argument '--width'"),
        ("fit bn_x5 --width two", "Error parsing --width: could not convert"),
        ("fit bn_x5 --width 0", "width=0.0 must be more than 0."),
        ("fit bn_x5 --seed -1", "seed=-1 must be at least 0."),
        ("fit bn_x5 --parallel gpipe", "invalid choice 'gpipe'"),
        ("fit bn_x5 --batch-size 6", "batch_size=6 is the global batch"),
        ("fit bn_x5 --dataset birds", "No data set 'birds'. There are: mnist_subset"),
        ("fit bn_x5 --dataset cifar10 --data-dir none", "cifar10 is not in none/"),
        ("evaluate", "Missing from python -m train evaluate: PATH"),
        ("evaluate none", "none holds no run (config.json is missing)."),
        ("evaluate . --checkpoint first", "invalid choice 'first'"),
        ("figure", "There is no figure ''. Figures: 1."),
        ("figure 9", "There is no figure '9'. Figures: 1."),
        ("figure 1 --num-steps 700", "num_steps=700 must be a multiple of 500."),
        ("figure 1 --num-steps 0", "num_steps=0 must be more than 0."),
        ("figure 1 --dataset cifar10", "invalid choice 'cifar10'"),
        ("figure 1 --dataset mnist --data-dir none", "mnist is not in none/"),
        ("--only figure7", "invalid choice 'figure7'"),
        ("--num-steps 5", "num_steps=5 must be a multiple of 500."),
        ("--epochs 5", "Unrecognized options: --epochs, 5. See python -m train"),
    ],
)
def test_bad_input_ends_in_one_clear_line(
    command, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert program.main(command.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_clear_in_a_box_of_unicode_too(monkeypatch, capsys):
    monkeypatch.setattr(type(sys.stdout), "encoding", "utf-8", raising=False)
    assert program.main(["--epochs", "5"]) == 2
    expected = "error: Unrecognized options: --epochs, 5. See python -m train --help.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    "command",
    ["--help", "fit --help", "fit bn_x5 --help", "evaluate --help", "figure 1 --help"],
)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main(command.split())
    assert stop.value.code == 0
    assert "usage: python -m train" in capsys.readouterr().out


def test_the_help_of_fit_lists_the_runs(capsys):
    with pytest.raises(SystemExit):
        program.main(["fit", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_fit_trains_the_named_run(calls, name):
    assert program.main(["fit", name]) == 0
    assert calls == [(RUNS[name], f"runs/{name}-{RUNS[name].dataset}", name)]


def test_fit_takes_every_field_of_the_contract(calls):
    options = {
        "dataset": "cifar10",
        "data_dir": "data",
        "batch_size": 8,
        "num_steps": 5,
        "learning_rate": 0.25,
        "width": 0.5,
        "seed": 3,
        "log_every": 1,
        "eval_every": 2,
        "checkpoint_every": 3,
        "parallel": "pmap",
        "accumulate": 4,
    }
    words = [
        word
        for name, value in options.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    assert program.main(["fit", "bn_x5", *words, "--workdir", "here"]) == 0
    ((config, workdir, _),) = calls
    assert {name: getattr(config, name) for name in options} == options
    assert workdir == "here"


def test_fit_prints_the_errors(calls, capsys):
    program.main(["fit", "mnist_sigmoid", "--num-steps", "5"])
    assert capsys.readouterr().out == (
        "mnist_sigmoid after 5 steps: top-1 error 25.00 %, top-5 error 10.00 %, "
        "n = 17; kept in runs/mnist_sigmoid-mnist_subset\n"
    )


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Interrupted(3), 143, f"{Interrupted(3)}\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (loop.Diverged("Step 3: no"), 2, "error: Step 3: no\n"),
    ],
    ids=["SIGTERM", "SIGINT", "divergence"],
)
def test_a_run_that_stops_says_so_by_its_status(
    error, status, message, monkeypatch, capsys
):
    def train(*args, **kwargs):
        raise error

    monkeypatch.setattr(loop, "train", train)
    assert program.main(["fit", "mnist_sigmoid"]) == status
    assert capsys.readouterr().err == message


def test_evaluate_prints_step_and_errors(monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "evaluate", lambda workdir, **options: (7, RESULT))
    assert program.main(["evaluate", "somewhere"]) == 0
    expected = "step 7: top-1 error 25.00 %, top-5 error 10.00 %, n = 17\n"
    assert capsys.readouterr().out == expected


# Several processes


def test_processes_are_told_their_number_by_the_environment(calls, monkeypatch):
    given = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kw: given.append(kw))
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert program.main(["fit", "mnist_sigmoid", "--multi-process"]) == 0
    assert given == [{"num_processes": 2, "process_id": 1}]


def test_a_cluster_tells_processes_by_itself(calls, monkeypatch):
    given = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kw: given.append(kw))
    assert program.main(["fit", "mnist_sigmoid", "--multi-process"]) == 0
    assert given == [{}]


@pytest.mark.parametrize("number", ["2", "two"])
def test_processes_that_cannot_meet_say_what_they_need(number, monkeypatch, capsys):
    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setenv("JAX_NUM_PROCESSES", number)
    assert program.main(["fit", "mnist_sigmoid", "--multi-process"]) == 2
    err = capsys.readouterr().err
    assert "set JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES" in err
    assert err.count("\n") == 1


def test_a_demo_that_is_stopped_says_so_in_one_line(monkeypatch, capsys):
    def stop(**_):
        raise Interrupted(3)

    monkeypatch.setattr("train.demo.run_demo", stop)
    assert program.main([]) == 143
    assert capsys.readouterr().err == f"{Interrupted(3)}\n"
