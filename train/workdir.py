"""What a run leaves on disk: its config, checkpoints and records."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from train.config import Config, RunError, from_dict
from train.step import TrainState, init_state

CONFIG = "config.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
PARTIAL = ".partial"  # a file that is being written

# What may differ when a run goes on: no value of it depends on these.
FREE = frozenset(
    {
        "num_steps",
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep",
        "parallel",
        "data_dir",
        "num_workers",
        "max_corrupt",
    }
)


def claim_workdir(
    workdir: Path,
    config: Config,
    *,
    free: frozenset[str] = FREE,
    file: str = CONFIG,
) -> None:
    """Makes `workdir` this run's, or raises when it is another's.

    Args:
      workdir: May be absent, empty, or of a run whose config is the same.
      config: The run.
      free: Fields that may differ.
      file: Takes the config; its name says which command the folder is of.
    """
    if workdir.exists() and not workdir.is_dir():
        raise RunError(f"{workdir} is not a folder. Choose another --workdir.")
    if (workdir / file).exists():
        _check_same_run(workdir, read_config(workdir, file), config, free)
    elif workdir.exists() and any(p.suffix != PARTIAL for p in workdir.iterdir()):
        raise RunError(
            f"{workdir} is not empty and holds no such run ({file} is missing). "
            "Choose another --workdir."
        )
    # Every process looks before the first one writes.
    multihost_utils.sync_global_devices("claim_workdir")
    if not (workdir / file).exists():
        write_config(workdir, config, file)


def write_config(workdir: Path, config: Config, file: str = CONFIG) -> None:
    """Writes the config of the run in `workdir`; process 0 alone."""
    if jax.process_index() != 0:
        return
    text = json.dumps(dataclasses.asdict(config), indent=2)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        _replace(workdir / file, text + "\n")
    except OSError as error:
        raise RunError(f"Cannot write in {workdir}: {error.strerror}.") from error


def read_config(workdir: Path, file: str = CONFIG) -> Config:
    """Returns the config of the run in `workdir`."""
    path = workdir / file
    if not path.exists():
        raise RunError(f"{workdir} holds no run ({file} is missing).")
    try:
        return from_dict(json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}.") from error


def _check_same_run(
    workdir: Path, old: Config, new: Config, free: frozenset[str]
) -> None:
    before, now = dataclasses.asdict(old), dataclasses.asdict(new)
    changed = [
        f"{name}={before[name]!r} there and {now[name]!r} here"
        for name in before
        if name not in free and before[name] != now[name]
    ]
    if changed:
        raise RunError(
            f"{workdir} holds another run: {'; '.join(changed)}. Choose another "
            "--workdir, or the same values to go on with that run."
        )


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_suffix(PARTIAL)
    partial.write_text(text)
    partial.replace(path)


def read_records(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl`, oldest first."""
    path = workdir / METRICS
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if (record := _parse_record(line))]


def rewind_records(workdir: Path, step: int) -> None:
    """Drops the records after `step`: the run makes them again from there."""
    kept = [record for record in read_records(workdir) if record["step"] <= step]
    _replace(workdir / METRICS, "".join(json.dumps(r) + "\n" for r in kept))


def _parse_record(line: str) -> dict[str, Any] | None:
    """Returns None for a line that a killed process left unfinished."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "step" in record else None


def _score(metrics: Any) -> float:
    """Returns what makes a checkpoint the best; less than any where unevaluated."""
    accuracy = metrics["accuracy"]
    return -1.0 if accuracy is None else accuracy


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Says in one line what is wrong with saved files."""
    try:
        yield
    except Exception as error:  # of whatever kind a broken file brings about
        reason = " ".join(str(error).split())
        raise RunError(
            f"Cannot read {folder}: {reason}. To go on from the checkpoint before it, "
            "move the folder of a damaged step away."
        ) from error


class Checkpoints:
    """The saved states of a run, written in the background."""

    def __init__(
        self, workdir: Path, keep: int = 1, *, read_only: bool = False
    ) -> None:
        """Opens the checkpoints of a run; `keep` newest stay, and the best one."""
        policies = ocp.checkpoint_managers
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(keep),
                    policies.BestN(get_metric_fn=_score, n=1),
                ]
            ),
            read_only=read_only,
            best_fn=_score,  # Without it Orbax does not save the metrics.
        )
        self._folder = (workdir / CHECKPOINTS).absolute()
        with _readable(self._folder):
            self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> "Checkpoints":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until everything is on disk."""
        self._manager.close()

    def latest_step(self) -> int | None:
        """Returns the newest step, or None before the first checkpoint."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Returns the step of best accuracy, or the newest where none was evaluated."""
        steps = self._manager.all_steps()
        scored = [(_score(self._manager.metrics(step)), step) for step in steps]
        return max(scored)[1] if scored else None

    def save(self, state: TrainState, accuracy: float | None) -> None:
        """Saves in the background; returns when `state` may be overwritten."""
        self._manager.save(
            int(state.step),
            args=ocp.args.StandardSave(state),
            metrics={"accuracy": accuracy},
        )

    def restore(self, config: Config, step: int, sharding: Sharding) -> TrainState:
        """Returns the state at `step`, laid out anew on the devices of `sharding`."""
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            jax.eval_shape(lambda: init_state(config)),
        )
        with _readable(self._folder / str(step)):
            restored: Any = self._manager.restore(
                step, args=ocp.args.StandardRestore(wanted)
            )
        return TrainState(*restored)
