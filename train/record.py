"""What a run tells: a progress bar, lines of `metrics.jsonl`, TensorBoard."""

import json
from pathlib import Path
from typing import Any, TextIO

import jax
import tensorboardX
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from train.workdir import METRICS


class Recorder:
    """Reports of one run; written by process 0 alone."""

    def __init__(self, workdir: Path, *, name: str, done: int, total: int) -> None:
        """Opens the reports of a run that has `done` of `total` steps behind it."""
        self._writes = jax.process_index() == 0
        self._lines: TextIO | None = None
        self._board: tensorboardX.SummaryWriter | None = None
        if self._writes:
            self._lines = (workdir / METRICS).open("a")
            # What a killed run had written after its checkpoint comes again.
            self._board = tensorboardX.SummaryWriter(
                str(workdir / "tensorboard"), purge_step=done + 1
            )
        self._progress = make_progress(disable=not self._writes)
        self._task = self._progress.add_task(name, total=total, completed=done)

    def __enter__(self) -> "Recorder":
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files."""
        self._progress.stop()
        if self._lines and self._board:
            self._lines.close()
            self._board.close()

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        self._progress.update(self._task, completed=step)

    def write(self, step: int, values: dict[str, float], *, group: str) -> None:
        """Adds a line, `{"step": ..., **values}`; `group` sorts TensorBoard's."""
        if not self._lines or not self._board:
            return
        record: dict[str, Any] = {"step": step, **values}
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{group}/{name}", value, step)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._writes:
            # A workdir may be called "[a]", which is markup to rich.
            self._progress.console.print(
                text, highlight=False, markup=False, emoji=False, soft_wrap=True
            )


class RateColumn(ProgressColumn):
    """Steps per second, once there are two reports to tell it from."""

    def render(self, task: Task) -> Text:
        """Returns the rate of a task."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f} steps/s", justify="right")


def make_progress(*, disable: bool = False) -> Progress:
    """Returns a bar with rate and time left, quiet where there is no terminal."""
    console = Console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=disable or not console.is_terminal,
    )
