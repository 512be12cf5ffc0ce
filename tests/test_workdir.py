import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from train.config import RUNS, RunError
from train.lock import WorkdirLock
from train.parallel import AXIS, replicated
from train.step import TrainState
from train.workdir import (
    CONFIG,
    METRICS,
    Checkpoints,
    claim_workdir,
    read_config,
    read_records,
    rewind_records,
    write_config,
)

RUN = RUNS["mnist_sigmoid"]


# Whose folder it is


@pytest.mark.parametrize("name", ["new", "new/nested"])
def test_a_new_folder_is_made_and_takes_the_config(tmp_path, name):
    claim_workdir(tmp_path / name, RUN)
    assert read_config(tmp_path / name) == RUN


def test_an_empty_folder_may_be_taken(tmp_path):
    claim_workdir(tmp_path, RUN)
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG]


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("dear to someone")
    with pytest.raises(RunError, match=r"is not empty and holds no such run"):
        claim_workdir(tmp_path, RUN)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file is not a folder\. Choose another"):
        claim_workdir(tmp_path / "file", RUN)


def test_another_run_is_refused_with_the_names_of_the_fields(tmp_path):
    claim_workdir(tmp_path, RUN)
    other = dataclasses.replace(RUN, seed=3, batch_norm=True, num_steps=1)
    with pytest.raises(RunError) as error:
        claim_workdir(tmp_path, other)
    assert "batch_norm=False there and True here; seed=0 there" in str(error.value)
    assert "num_steps" not in str(error.value)
    assert read_config(tmp_path) == RUN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 9),
        ("log_every", 9),
        ("eval_every", 9),
        ("checkpoint_every", 9),
        ("keep", 9),
        ("parallel", "pmap"),
        ("data_dir", "elsewhere"),
        ("num_workers", 9),
    ],
)
def test_what_changes_no_number_may_change(tmp_path, field, value):
    claim_workdir(tmp_path, RUN)
    later = dataclasses.replace(RUN, **{field: value})
    claim_workdir(tmp_path, later)
    write_config(tmp_path, later)
    assert read_config(tmp_path) == later


def test_two_commands_do_not_share_a_folder(tmp_path):
    claim_workdir(tmp_path, RUN, file="figure1.json")
    with pytest.raises(RunError, match=r"\(config.json is missing\)"):
        claim_workdir(tmp_path, RUN)


def test_a_process_other_than_the_first_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    claim_workdir(tmp_path / "run", RUN)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run_has_no_config(tmp_path):
    with pytest.raises(RunError, match=r"holds no run \(config.json is missing\)"):
        read_config(tmp_path)


# Records


def write_lines(workdir, *lines):
    (workdir / METRICS).write_text("".join(lines))


def test_records_come_in_their_order(tmp_path):
    write_lines(tmp_path, '{"step": 1, "loss": 2.5}\n', '{"step": 2}\n')
    assert read_records(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2}]


def test_there_are_no_records_before_the_first(tmp_path):
    assert read_records(tmp_path) == []


def test_a_line_cut_off_by_a_kill_is_passed_over(tmp_path):
    write_lines(tmp_path, '{"step": 1}\n', '{"step": 2, "lo')
    assert read_records(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("line", ["null", "7", "{}", "[]"])
def test_a_line_that_is_no_record_is_passed_over(tmp_path, line):
    write_lines(tmp_path, '{"step": 1}\n', line + "\n")
    assert read_records(tmp_path) == [{"step": 1}]


def test_rewinding_drops_what_comes_after_a_step(tmp_path):
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3)]
    write_lines(tmp_path, *lines, '{"step": 4, "lo')
    rewind_records(tmp_path, 2)
    assert (tmp_path / METRICS).read_text() == "".join(lines[:3])


# Checkpoints


def make_state(step):
    return TrainState(
        step=jnp.int32(step),
        params={"w": jnp.arange(4.0) + step},
        batch_stats={},
        opt_state=(),
        position=jnp.int32(60 * step),
    )


def save_all(workdir, accuracies, *, keep, first=1):
    with Checkpoints(workdir, keep) as checkpoints:
        for step, accuracy in enumerate(accuracies, start=first):
            checkpoints.save(make_state(step), accuracy)


def saved_steps(workdir):
    folders = (workdir / "checkpoints").iterdir()
    return sorted(int(path.name) for path in folders if path.name.isdigit())


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.1, 0.9, 0.2, 0.3, 0.4], [2, 4, 5]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [4, 5]),
        ([0.1, 0.9, None, None, None], [2, 4, 5]),
        ([None, None, None, None, None], [4, 5]),
    ],
    ids=["early", "late", "some unevaluated", "none evaluated"],
)
def test_the_newest_and_the_best_stay(tmp_path, accuracies, expected):
    save_all(tmp_path, accuracies, keep=2)
    assert saved_steps(tmp_path) == expected


def test_the_best_stays_when_the_run_goes_on_later(tmp_path):
    save_all(tmp_path, [0.1, 0.9, 0.2], keep=1)
    save_all(tmp_path, [0.3, 0.4], keep=1, first=4)
    assert saved_steps(tmp_path) == [2, 5]
    with Checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.best_step(), checkpoints.latest_step()) == (2, 5)


def test_looking_at_checkpoints_removes_none(tmp_path):
    save_all(tmp_path, [0.1, 0.2, 0.3], keep=3)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.best_step() == 3
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_without_an_evaluation_the_newest_is_the_best(tmp_path):
    save_all(tmp_path, [None, None], keep=3)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.best_step() == 2


def test_before_the_first_checkpoint_there_is_no_step(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() is checkpoints.best_step() is None


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_state_comes_back_on_the_devices_asked_for(
    tmp_path, num_devices, monkeypatch
):
    monkeypatch.setattr("train.workdir.init_state", lambda config: make_state(0))
    save_all(tmp_path, [0.5], keep=1)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
    with Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.restore(RUN, 1, replicated(mesh))
    assert len(state.params["w"].devices()) == num_devices
    jax.tree.map(np.testing.assert_array_equal, state, make_state(1))


@pytest.mark.parametrize("part", ["default", "metrics"])
def test_a_damaged_checkpoint_is_named_and_may_be_moved_away(
    part, tmp_path, monkeypatch
):
    monkeypatch.setattr("train.workdir.init_state", lambda config: make_state(0))
    save_all(tmp_path, [0.5, 0.6], keep=2)
    folder = tmp_path / "checkpoints" / "2"
    files = [path for path in (folder / part).rglob("*") if path.is_file()]
    assert [path.write_bytes(b"") for path in files]
    sharding = replicated(Mesh(np.array(jax.devices()[:1]), (AXIS,)))

    def restore():
        with Checkpoints(tmp_path) as checkpoints:
            return checkpoints.restore(RUN, checkpoints.latest_step(), sharding)

    with pytest.raises(RunError, match=f"Cannot read {folder.parent}"):
        restore()
    folder.rename(tmp_path / "away")
    assert restore().position == 60


def test_two_commands_do_not_work_in_one_folder(tmp_path):
    with (
        WorkdirLock(tmp_path),
        pytest.raises(RunError, match="Another command is at work in"),
    ):
        WorkdirLock(tmp_path)


def test_a_folder_is_free_again_after_the_command(tmp_path):
    for _ in range(2):
        with WorkdirLock(tmp_path):
            assert (tmp_path / "lock").exists()
