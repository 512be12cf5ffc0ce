import json

import jax
import pytest
from tensorboardX.proto.event_pb2 import Event

from train.record import Recorder, make_progress


@pytest.fixture
def terminal(monkeypatch):
    """Makes rich believe that its output is a wide terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


def record_two(workdir, *, done=0):
    with Recorder(workdir, name="run", done=done, total=10) as recorder:
        recorder.write(done + 1, {"loss": 2.5}, group="train")
        recorder.write(done + 2, {"accuracy": 0.5, "count": 17}, group="eval")


def read_board(path):
    """The events of a TensorBoard file: length, its checksum, message, checksum."""
    data, events = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_a_report_is_a_line(tmp_path):
    record_two(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "accuracy": 0.5, "count": 17},
    ]


def test_a_line_is_on_disk_at_once(tmp_path):
    with Recorder(tmp_path, name="run", done=0, total=10) as recorder:
        recorder.write(1, {"loss": 2.5}, group="train")
        assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'


def test_a_resumed_run_adds_lines(tmp_path):
    record_two(tmp_path)
    record_two(tmp_path, done=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    record_two(tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    values = [(e.step, v) for e in read_board(path) for v in e.summary.value]
    assert [(step, v.tag, v.simple_value) for step, v in values] == [
        (1, "train/loss", 2.5),
        (2, "eval/accuracy", 0.5),
        (2, "eval/count", 17),
    ]


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path):
    record_two(tmp_path, done=5)
    (path,) = (tmp_path / "tensorboard").iterdir()
    starts = [e.step for e in read_board(path) if e.session_log.status]
    assert starts == [6]


def test_other_processes_write_and_say_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    record_two(tmp_path)
    with Recorder(tmp_path, name="run", done=0, total=10) as recorder:
        recorder.say("hello")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["in [a]", "in [/x]", "in :smile:", "a" * 300])
def test_a_line_is_said_as_it_is(tmp_path, capsys, text):
    with Recorder(tmp_path, name="run", done=0, total=10) as recorder:
        recorder.say(text)
    assert capsys.readouterr().out == text + "\n"


def test_where_there_is_no_terminal_there_is_no_bar(capsys):
    with make_progress() as progress:
        task = progress.add_task("run", total=10)
        progress.update(task, completed=5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("completed", [[], [1], [1, 2, 10]])
def test_a_terminal_shows_a_bar_at_any_time(terminal, capsys, completed):
    with make_progress() as progress:
        task = progress.add_task("run", total=10)
        for step in completed:
            progress.update(task, completed=step)
            progress.refresh()
    last = capsys.readouterr().out.split("run")[-1]
    assert f"{completed[-1] if completed else 0}/10" in last


def test_a_bar_shows_rate_and_time_left(terminal, capsys):
    now = iter(range(100))
    with make_progress() as progress:
        progress.get_time = lambda: next(now)
        task = progress.add_task("run", total=10)
        progress.update(task, completed=1)
        progress.update(task, completed=2)
        progress.refresh()
    out = capsys.readouterr().out
    assert "1.0 steps/s" in out
    assert "0:00:08" in out
