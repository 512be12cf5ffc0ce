"""Figure 1 of the paper: digits, three layers of sigmoids, with and without BN."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from train.augment import standardize
from train.config import RUNS, Config, RunError
from train.data import DATASETS, check_data, epoch_order, load_arrays
from train.lock import WorkdirLock
from train.plot import plot_figure1
from train.record import make_progress
from train.step import (
    TrainState,
    first_state,
    make_model,
    make_train_step,
    metrics_of,
)
from train.workdir import FREE, METRICS, claim_workdir, read_records

NETWORKS = {"without BN": "mnist_sigmoid", "with BN": "mnist_sigmoid_bn"}
CONFIG = "figure1.json"
UNIT = 0  # of the last hidden layer: the sigmoid of panels (b) and (c)
PERCENTILES = (15, 50, 85)
REPORT_EVERY = 500  # steps, in one dispatch
MILESTONES = (2_000, 10_000, 50_000)

Record = dict[str, Any]
Seen = tuple[dict[str, Array], Array]  # sums over the test set, percentiles


class Report(NamedTuple):
    """What a device tells of a network, or will when it gets there."""

    step: int
    loss: Array | None  # mean over the steps since the last report
    sums: dict[str, Array]  # over the test set
    percentiles: Array


def run_figure1(
    *,
    dataset: str,
    data_dir: str | None,
    num_steps: int,
    seed: int,
    workdir: Path | None = None,
) -> list[Record]:
    """Trains both networks, writes records and `figure1.png`, prints a comparison.

    A finished figure in `workdir` is drawn again from its records.
    """
    workdir = workdir or Path("runs") / f"figure1-{dataset}"
    configs = {
        network: dataclasses.replace(
            RUNS[run],
            dataset=dataset,
            data_dir=data_dir,
            num_steps=num_steps,
            seed=seed,
        )
        for network, run in NETWORKS.items()
    }
    if num_steps % REPORT_EVERY:
        raise RunError(f"num_steps={num_steps} must be a multiple of {REPORT_EVERY}.")
    records = read_records(workdir)
    finished = len(records) == len(NETWORKS) * (1 + num_steps // REPORT_EVERY)
    if not finished:
        check_data(dataset, data_dir)
    free = FREE - {"num_steps"}
    claim_workdir(workdir, configs["with BN"], free=free, file=CONFIG)
    if not finished:
        with WorkdirLock(workdir):
            if records:
                print(f"The unfinished figure in {workdir} begins again.")
            records = _train_networks(configs, workdir / METRICS)
    path = workdir / "figure1.png"
    plot_figure1(records, caption(configs["with BN"])).savefig(path)
    print(compare(records))
    print(f"drawn in {path}")
    return records


def caption(config: Config) -> str:
    """Returns what a reader of the figure has to know."""
    return (
        f"{config.dataset}: 784-100-100-100-10 sigmoid network, SGD, batches of "
        f"{config.batch_size}, learning rate {config.learning_rate}, seed "
        f"{config.seed}.\n(b), (c): percentiles over the test digits of the input of "
        f"sigmoid {UNIT + 1} of the last hidden layer."
    )


def compare(records: list[Record]) -> str:
    """Returns a table of test accuracy at the milestones, and at the end."""
    accuracy = {(r["network"], r["step"]): 100 * r["accuracy"] for r in records}
    last = max(record["step"] for record in records)
    steps = sorted({step for step in MILESTONES if step <= last} | {last})
    lines = [f"test accuracy (%), {records[0]['count']} digits"]
    lines.append("   steps" + "".join(f"{name:>13}" for name in NETWORKS))
    for step in steps:
        cells = (f"{accuracy[name, step]:13.2f}" for name in NETWORKS)
        lines.append(f"{step:8d}" + "".join(cells))
    return "\n".join(lines)


def _train_networks(configs: dict[str, Config], path: Path) -> list[Record]:
    """Returns the records of all networks; each is written as it comes."""
    runs = start_networks(list(configs.values()))
    records = []
    with path.open("w") as lines, make_progress() as progress:
        tasks = [
            progress.add_task(f"Figure 1, {network}", total=config.num_steps)
            for network, config in configs.items()
        ]
        # The steps of all networks are under way before the first one is waited for.
        for reports in zip(*runs, strict=True):
            for network, task, report in zip(configs, tasks, reports, strict=True):
                record = {**_record(report), "network": network}
                if not math.isfinite(record.get("loss", 0)):
                    raise RunError(
                        f"Figure 1, {network}: the loss is {record['loss']} in the "
                        f"{REPORT_EVERY} steps before step {record['step']}."
                    )
                lines.write(json.dumps(record) + "\n")
                records.append(record)
                progress.update(task, completed=record["step"])
    return records


def start_networks(configs: list[Config]) -> list[Iterator[Report]]:
    """Returns the reports of each, that train at the same time.

    Each is on a device of its own, where there are enough of them.
    """
    data = load_digits(configs[0])
    devices = itertools.cycle(jax.local_devices())
    return [
        train_network(config, jax.device_put(data, device))
        for config, device in zip(configs, devices, strict=False)
    ]


def load_digits(config: Config) -> dict[str, Array]:
    """Returns images, labels, test_images and test_labels on one device."""
    dataset = DATASETS[config.dataset]
    arrays = {}
    for prefix, split, max_corrupt in (
        ("", dataset.train_split, config.max_corrupt),
        ("test_", dataset.eval_split, 0),
    ):
        images, labels = load_arrays(
            config.dataset,
            split=split,
            data_dir=config.data_dir,
            max_corrupt=max_corrupt,
        )
        arrays[prefix + "images"] = jnp.asarray(images)
        arrays[prefix + "labels"] = jnp.asarray(labels)
    return arrays


def train_network(config: Config, data: dict[str, Array]) -> Iterator[Report]:
    """Yields a report before the first step and after each 500, without waiting."""
    state = first_state(config)
    yield Report(0, None, *jax.jit(make_look(config))(state, data))
    block = jax.jit(make_block(config), donate_argnums=0)
    for step in range(REPORT_EVERY, config.num_steps + 1, REPORT_EVERY):
        state, loss, seen = block(state, data)
        yield Report(step, loss, *seen)


def make_block(config: Config) -> Callable[..., tuple[TrainState, Array, Seen]]:
    """Returns 500 training steps and a look at their result, as one program."""
    train_step, look = make_train_step(config), make_look(config)
    key = jax.random.key(config.seed)

    def block(
        state: TrainState, data: dict[str, Array]
    ) -> tuple[TrainState, Array, Seen]:
        def step(state: TrainState, rows: Array) -> tuple[TrainState, Array]:
            batch = {"image": data["images"][rows], "label": data["labels"][rows]}
            state, metrics = train_step(state, batch)
            return state, metrics["loss"] / config.batch_size

        drawn = REPORT_EVERY * config.batch_size
        order = epoch_order(key, state.position, drawn, len(data["labels"]))
        rows = order.reshape(REPORT_EVERY, config.batch_size)
        state, losses = lax.scan(step, state, rows)
        return state, losses.mean(), look(state, data)

    return block


def make_look(config: Config) -> Callable[..., Seen]:
    """Returns the function that tests a state: sums, and percentiles of one unit."""
    model = make_model(config)

    def look(state: TrainState, data: dict[str, Array]) -> Seen:
        logits, seen = model.apply(
            {"params": state.params, "batch_stats": state.batch_stats},
            standardize(data["test_images"]),
            train=False,
            mutable=["intermediates"],
        )
        sown: Any = seen["intermediates"]
        inputs = sown["preactivation"][-1]
        percentiles = jnp.percentile(
            inputs[:, UNIT], jnp.asarray(PERCENTILES, jnp.float32)
        )
        sums = metrics_of(logits, {"label": data["test_labels"]})
        return sums, percentiles

    return look


def _record(report: Report) -> Record:
    step, loss, sums, percentiles = jax.device_get(report)
    count = int(sums["count"])
    return {
        "step": step,
        **({} if loss is None else {"loss": float(loss)}),
        "accuracy": float(sums["correct"]) / count,
        "count": count,
        "percentiles": [float(value) for value in percentiles],
    }
