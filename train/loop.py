"""Training: devices, checkpoints and reports around the steps."""

import dataclasses
import functools
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from train.config import Config, RunError
from train.data import check_data, eval_batches, train_batches
from train.parallel import (
    AXIS,
    check_batch_size,
    make_mesh,
    parallelize,
    replicated,
    sharded,
)
from train.record import Recorder
from train.step import TrainState, eval_step, init_state, make_model, make_train_step
from train.workdir import Checkpoints, claim_workdir, read_config, rewind_records

Metrics = dict[str, float]

# XLA:CPU would optimize for a minute what runs once, for a millisecond.
FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state."""


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
      RunError: The batch does not divide over the devices, or `workdir` is another's.
      Diverged: With the step; the last good checkpoint stays.
      Interrupted: SIGTERM came; the state is saved.
    """
    mesh = make_mesh()
    check_batch_size(config.batch_size, mesh)
    # First of all: a run without data shall leave no workdir behind.
    check_data(config.dataset, config.data_dir)
    claim_workdir(workdir, config)
    with Checkpoints(workdir, config.keep) as checkpoints, StopSignal() as stop:
        state = _first_state(config, checkpoints, mesh)
        done = int(state.step)
        if jax.process_index() == 0:
            rewind_records(workdir, done)
        with Recorder(
            workdir, name=name, done=done, total=config.num_steps
        ) as recorder:
            if done:
                recorder.say(f"{name}: goes on from step {done} in {workdir}")
            run = Run(config, mesh, checkpoints, recorder, stop)
            return run.until_the_end(state)


def _first_state(config: Config, checkpoints: Checkpoints, mesh: Mesh) -> TrainState:
    """Returns the newest saved state, or a new one; on every device."""
    latest = checkpoints.latest_step()
    if latest is not None:
        return checkpoints.restore(config, latest, replicated(mesh))
    initialize = jax.jit(
        functools.partial(init_state, config),
        out_shardings=replicated(mesh),
        compiler_options=FAST_COMPILE if jax.default_backend() == "cpu" else None,
    )
    return initialize()


class Run:
    """The steps of one run and what happens between them."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        checkpoints: Checkpoints,
        recorder: Recorder,
        stop: "StopSignal",
    ) -> None:
        """Binds together what a run needs."""
        self.config = config
        self.mesh = mesh
        self.checkpoints = checkpoints
        self.recorder = recorder
        self.stop = stop
        self.evaluation = Evaluation(config, mesh)

    def until_the_end(self, state: TrainState) -> Metrics:
        """Returns the last evaluation."""
        config, result = self.config, {}
        first = int(state.step) + 1
        if first > config.num_steps:
            return self.evaluation(state)
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
                result = self._evaluate(step, state)
            if saving:
                self.checkpoints.save(state, result["accuracy"] if evaluating else None)
            if stopping:
                raise Interrupted(
                    f"Stopped after step {step}, which is saved. The same command "
                    "goes on from there."
                )
        return result

    def _report(self, step: int, pending: list[Any]) -> None:
        """Records the steps since the last report; raises at the first that failed."""
        fetched = jax.device_get(pending)
        for number, metrics in enumerate(fetched, start=step - len(fetched) + 1):
            if not math.isfinite(metrics["loss"] + metrics["grad_norm"]):
                raise Diverged(
                    f"Step {number}: loss or gradient is not finite (loss "
                    f"{metrics['loss']}, gradient norm {metrics['grad_norm']}). The "
                    f"last good checkpoint is step {self.checkpoints.latest_step()}. "
                    "Lower --learning-rate, or start from it elsewhere."
                )
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
    )


class Evaluation:
    """Accuracy over a split, every example exactly once; compiled once."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Holds the run's model and data."""
        self._config = config
        self._mesh = mesh
        self._step = jax.jit(
            functools.partial(eval_step, model=make_model(config)),
            out_shardings=replicated(mesh),
        )

    def __call__(
        self,
        state: TrainState,
        *,
        split: str | None = None,
        batch_size: int | None = None,
    ) -> Metrics:
        """Returns `accuracy`, `accuracy_top5`, `eval_loss`, and `count`."""
        config = self._config
        batches = eval_batches(
            config.dataset,
            batch_size=batch_size or config.batch_size,
            sharding=sharded(self._mesh),
            data_dir=config.data_dir,
            split=split,
            image_size=config.image_size,
        )
        sums = [self._step(state, batch) for batch in batches]
        total = {
            key: sum(float(each[key]) for each in jax.device_get(sums))
            for key in ("loss", "correct", "correct_top5", "count")
        }
        count = max(total["count"], 1.0)
        return {
            "accuracy": total["correct"] / count,
            "accuracy_top5": total["correct_top5"] / count,
            "eval_loss": total["loss"] / count,
            "count": int(total["count"]),
        }


class StopSignal:
    """Notices SIGTERM, so that a run can save before it ends."""

    def __enter__(self) -> "StopSignal":
        """Begins to listen."""
        self._received = False
        self._previous = None
        if jax.process_count() == 1:
            self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops listening."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, *_: object) -> None:
        self._received = True
        print("SIGTERM: saving after this step", file=sys.stderr, flush=True)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`; the same in every process."""
        if jax.process_count() == 1:
            return self._received
        # JAX's own service catches the signal and picks a step all can stop after.
        return multihost_utils.reached_preemption_sync_point(step)


def evaluate(
    workdir: Path,
    *,
    checkpoint: str = "latest",
    data_dir: str | None = None,
    split: str | None = None,
    batch_size: int | None = None,
) -> tuple[int, Metrics]:
    """Returns the step of a saved state and its evaluation on `split`."""
    if batch_size is not None and batch_size < 1:
        raise RunError(f"batch_size={batch_size} must be more than 0.")
    config = read_config(workdir)
    if data_dir is not None:
        config = dataclasses.replace(config, data_dir=data_dir)
    mesh = make_mesh()
    with Checkpoints(workdir) as checkpoints:
        newest = checkpoints.latest_step()
        step = newest if checkpoint == "latest" else checkpoints.best_step()
        if step is None:
            raise RunError(f"The run in {workdir} has no checkpoint yet.")
        state = checkpoints.restore(config, step, replicated(mesh))
    result = Evaluation(config, mesh)(state, split=split, batch_size=batch_size)
    return step, result
