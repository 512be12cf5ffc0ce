"""Accuracy of a state, every example exactly once."""

import dataclasses
import functools
from pathlib import Path

import jax
from jax.sharding import Mesh

from train.config import Config, RunError
from train.data import eval_batches
from train.parallel import make_mesh, replicated, sharded
from train.step import TrainState, eval_step, make_model
from train.stop import StopSignal
from train.workdir import Checkpoints, read_config

Metrics = dict[str, float]


class Evaluation:
    """Accuracy over a split, every example exactly once; compiled once."""

    def __init__(
        self, config: Config, mesh: Mesh, stop: StopSignal | None = None
    ) -> None:
        """Holds the run's model and data; `stop` ends an evaluation between batches."""
        self._stop = stop
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
            num_workers=config.num_workers,
        )
        sums = []
        for batch in batches:
            if self._stop:
                self._stop.check(int(state.step))
            sums.append(self._step(state, batch))
            if jax.default_backend() == "cpu":
                # Processes may not start independent programs in different orders:
                # each would wait in its own all-reduce.
                jax.block_until_ready(sums[-1])
        sums = jax.device_get(sums)
        total = {
            key: sum(float(each[key]) for each in sums)
            for key in ("loss", "correct", "correct_top5", "count")
        }
        count = max(total["count"], 1.0)
        return {
            "accuracy": total["correct"] / count,
            "accuracy_top5": total["correct_top5"] / count,
            "eval_loss": total["loss"] / count,
            "count": int(total["count"]),
        }


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
    with Checkpoints(workdir, read_only=True) as checkpoints:
        newest = checkpoints.latest_step()
        step = newest if checkpoint == "latest" else checkpoints.best_step()
        if step is None:
            raise RunError(f"The run in {workdir} has no checkpoint yet.")
        state = checkpoints.restore(config, step, replicated(mesh))
    result = Evaluation(config, mesh)(state, split=split, batch_size=batch_size)
    return step, result
