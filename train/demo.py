"""The main job: Figure 1, then two networks in small over every device."""

import dataclasses
import math
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
    # Before the figure takes its minute: what is wrong with them is said at once.
    configs = {
        name: small(RUNS[name], dataset, data_dir, network_steps, seed)
        for name in ("inception", "bn_x5")
    }
    if only != "networks":
        run_figure1(
            dataset=dataset,
            data_dir=data_dir,
            num_steps=num_steps,
            seed=seed,
            workdir=workdir / "figure1",
        )
    if only != "figure1":
        run_networks(configs, workdir)


def run_networks(configs: dict[str, Config], workdir: Path) -> None:
    """Trains each and prints test accuracies."""
    accuracy = {
        name: train(config, workdir / name, name=name)["accuracy"]
        for name, config in configs.items()
    }
    steps = {config.num_steps for config in configs.values()}
    print(
        f"test accuracy (%) after {', '.join(map(str, steps))} steps on "
        f"{jax.device_count()} {jax.default_backend()} devices"
    )
    for name, value in accuracy.items():
        print(f"{name:>12}{100 * value:8.2f}")


def small(
    config: Config, dataset: str, data_dir: str | None, num_steps: int, seed: int
) -> Config:
    """Returns a run in small: an eighth of the channels, batches of 64 or more."""
    devices = jax.device_count()
    return dataclasses.replace(
        config,
        dataset=dataset,
        data_dir=data_dir,
        width=0.125,
        batch_size=math.ceil(64 / devices) * devices,
        num_steps=num_steps,
        seed=seed,
        log_every=10,
        eval_every=num_steps,
        checkpoint_every=num_steps,
    )
