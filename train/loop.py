"""Training: devices, checkpoints and reports around the steps."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from train.config import Config, RunError
from train.data import check_data, train_batches
from train.evaluation import Evaluation, Metrics
from train.lock import WorkdirLock
from train.parallel import (
    AXIS,
    check_layout,
    make_mesh,
    parallelize,
    replicated,
    sharded,
)
from train.record import Recorder
from train.step import TrainState, first_state, make_train_step
from train.stop import Interrupted, StopSignal
from train.workdir import (
    Checkpoints,
    claim_workdir,
    read_records,
    rewind_records,
    write_config,
)


class Diverged(RunError):
    """The loss or its gradient is not finite."""


def train(config: Config, workdir: Path, *, name: str = "train") -> Metrics:
    """Trains until `num_steps`, going on from the newest checkpoint in `workdir`.

    Args:
      config: The run; a run of another config in `workdir` is an error.
      workdir: Takes `config.json`, `metrics.jsonl`, TensorBoard events, checkpoints.
      name: For the progress bar.

    Returns:
      The last evaluation: `accuracy`, `accuracy_top5` and `eval_loss` over `count`
      examples.

    Raises:
      RunError: The batch does not divide over the devices, or `workdir` is another's,
        or in use.
      Diverged: With the step; the last good checkpoint stays.
      Interrupted: SIGTERM came; the state is saved.
    """
    mesh = make_mesh()
    check_layout(config, mesh)
    # First of all: a run without data shall leave no workdir behind.
    check_data(config.dataset, config.data_dir)
    claim_workdir(workdir, config)
    with (
        WorkdirLock(workdir),
        StopSignal() as stop,
        Checkpoints(workdir, config.keep) as checkpoints,
    ):
        state = _first_state(config, checkpoints, mesh)
        done = int(state.step)
        if done > config.num_steps:
            raise RunError(
                f"The run in {workdir} is at step {done} already, behind num_steps="
                f"{config.num_steps}. Give more, or another --workdir."
            )
        write_config(workdir, config)
        owed = _evaluation_is_owed(config, workdir, done)
        if jax.process_index() == 0:
            rewind_records(workdir, done)
        with Recorder(
            workdir, name=name, done=done, total=config.num_steps
        ) as recorder:
            if done:
                recorder.say(f"{name}: goes on from step {done} in {workdir}")
            run = Run(config, mesh, checkpoints, recorder, stop)
            return run.until_the_end(state, owed=owed)


def _evaluation_is_owed(config: Config, workdir: Path, done: int) -> bool:
    """Returns whether a run that was stopped skipped the evaluation of its step."""
    due = done > 0 and (done == config.num_steps or done % config.eval_every == 0)
    recorded = any(
        record["step"] == done and "accuracy" in record
        for record in read_records(workdir)
    )
    # Process 0 keeps the records, and all have to do the same.
    return bool(multihost_utils.broadcast_one_to_all(due and not recorded))


def _first_state(config: Config, checkpoints: Checkpoints, mesh: Mesh) -> TrainState:
    """Returns the newest saved state, or a new one; on every device."""
    latest = checkpoints.latest_step()
    if latest is not None:
        return checkpoints.restore(config, latest, replicated(mesh))
    return first_state(config, replicated(mesh))


class Run:
    """The steps of one run and what happens between them."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        checkpoints: Checkpoints,
        recorder: Recorder,
        stop: StopSignal,
    ) -> None:
        """Binds together what a run needs."""
        self.config = config
        self.mesh = mesh
        self.checkpoints = checkpoints
        self.recorder = recorder
        self.stop = stop
        self.evaluation = Evaluation(config, mesh, stop)

    def until_the_end(self, state: TrainState, *, owed: bool) -> Metrics:
        """Returns the last evaluation; `owed`: begins with one."""
        config = self.config
        first = int(state.step) + 1
        result = self._evaluate(first - 1, state) if owed else {}
        if first > config.num_steps:
            return result or self.evaluation(state)
        train_step = parallelize(
            make_train_step(config, AXIS, sum_gradients=config.parallel == "pmap"),
            self.mesh,
            config.parallel,
        )
        batches = _training_batches(config, self.mesh, int(state.position))
        pending: list[Any] = []
        for step in range(first, config.num_steps + 1):
            state, metrics = train_step(state, next(batches))
            pending.append(metrics)
            stopping = self.stop.requested(step)
            last = step == config.num_steps
            evaluating = not stopping and (last or step % config.eval_every == 0)
            saving = stopping or last or step % config.checkpoint_every == 0
            if saving or evaluating or step % config.log_every == 0:
                self._report(step, pending)
                pending = []
            if evaluating:
                result = self._evaluate_or_save(step, state)
            if saving:
                self._save(step, state, result["accuracy"] if evaluating else None)
            if stopping:
                raise Interrupted(step)
        return result

    def _report(self, step: int, pending: list[Any]) -> None:
        """Records the steps since the last report; raises at the first that failed."""
        fetched = jax.device_get(pending)
        for number, metrics in enumerate(fetched, start=step - len(fetched) + 1):
            if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
                loss, norm = metrics["loss"], metrics["grad_norm"]
                self._give_up(number, f"loss {loss}, gradient norm {norm}")
        sums = {
            key: float(sum(metrics[key] for metrics in fetched))
            for key in ("loss", "correct", "count")
        }
        count = max(sums["count"], 1.0)
        values = {
            "loss": sums["loss"] / count,
            "train_accuracy": sums["correct"] / count,
            "grad_norm": float(fetched[-1]["grad_norm"]),
        }
        self.recorder.advance(step)
        self.recorder.write(step, values, group="train")

    def _save(self, step: int, state: TrainState, accuracy: float | None) -> None:
        """Saves a state that a run can go on from."""
        for kind in ("params", "batch_stats"):
            leaves = jax.device_get(jax.tree.leaves(getattr(state, kind)))
            if not all(np.isfinite(leaf).all() for leaf in leaves):
                self._give_up(step, kind)
        self.checkpoints.save(state, accuracy)

    def _give_up(self, step: int, what: str) -> NoReturn:
        """Raises; the checkpoints stay as they are."""
        good = self.checkpoints.latest_step()
        kept = "There is no checkpoint yet" if good is None else f"Step {good} is saved"
        raise Diverged(
            f"Not finite at step {step}: {what}. {kept}. Lower --learning-rate, in "
            "another --workdir."
        )

    def _evaluate_or_save(self, step: int, state: TrainState) -> Metrics:
        """Returns an evaluation; should it fail or be stopped, the step is saved.

        Not with several processes: the others may not know, and a save needs all.
        """
        try:
            return self._evaluate(step, state)
        except BaseException:
            if jax.process_count() == 1:
                self._save(step, state, None)
            raise

    def _evaluate(self, step: int, state: TrainState) -> Metrics:
        """Evaluates and records it."""
        config = self.config
        seen = 3 / max(1 - config.bn_momentum, 1e-6)
        if config.batch_norm and step < seen:
            self.recorder.say(
                f"step {step}: the running averages still hold their first values; "
                f"with --bn-momentum {config.bn_momentum} they take {seen:.0f} steps."
            )
        result = self.evaluation(state)
        self.recorder.write(step, result, group="eval")
        self.recorder.say(
            f"step {step}: accuracy {100 * result['accuracy']:.2f} % "
            f"of {result['count']} examples"
        )
        return result


def _training_batches(
    config: Config, mesh: Mesh, position: int
) -> Iterator[dict[str, jax.Array]]:
    return train_batches(
        config.dataset,
        batch_size=config.batch_size,
        seed=config.seed,
        sharding=sharded(mesh),
        position=position,
        data_dir=config.data_dir,
        image_size=config.image_size,
        num_workers=config.num_workers,
        max_corrupt=config.max_corrupt,
    )
