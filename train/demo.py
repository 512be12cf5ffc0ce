"""The main job: Figure 1, then two networks in small over every device."""

import dataclasses
from pathlib import Path

import jax

from train.config import RUNS, Config
from train.figure1 import run_figure1
from train.loop import train
from train.parallel import simulate_devices


def run_demo(
    *,
    only: str | None,
    dataset: str,
    data_dir: str | None,
    num_steps: int,
    network_steps: int,
    seed: int,
    workdir: Path | None,
) -> None:
    """Runs both parts, or one; `workdir` None: `runs/demo-DATASET`."""
    simulate_devices()
    workdir = workdir or Path("runs") / f"demo-{dataset}"
    if only != "networks":
        run_figure1(
            dataset=dataset,
            data_dir=data_dir,
            num_steps=num_steps,
            seed=seed,
            workdir=workdir / "figure1",
        )
    if only != "figure1":
        run_networks(
            dataset=dataset,
            data_dir=data_dir,
            num_steps=network_steps,
            seed=seed,
            workdir=workdir,
        )


def run_networks(
    *, dataset: str, data_dir: str | None, num_steps: int, seed: int, workdir: Path
) -> dict[str, float]:
    """Trains `inception` and `bn_x5` in small, prints and returns test accuracies."""
    devices = jax.device_count()
    accuracy = {}
    for name in ("inception", "bn_x5"):
        config = small(RUNS[name], dataset, data_dir, num_steps, seed)
        accuracy[name] = train(config, workdir / name, name=name)["accuracy"]
    print(
        f"test accuracy (%) after {num_steps} steps on {devices} "
        f"{jax.default_backend()} devices"
    )
    for name, value in accuracy.items():
        print(f"{name:>12}{100 * value:8.2f}")
    return accuracy


def small(
    config: Config, dataset: str, data_dir: str | None, num_steps: int, seed: int
) -> Config:
    """Returns a run in small: an eighth of the channels, batches of 64."""
    return dataclasses.replace(
        config,
        dataset=dataset,
        data_dir=data_dir,
        width=0.125,
        batch_size=64,
        num_steps=num_steps,
        seed=seed,
        log_every=10,
        eval_every=num_steps,
        checkpoint_every=num_steps,
    )
