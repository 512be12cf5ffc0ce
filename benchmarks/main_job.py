"""Figure 1 beside the same training written plainly in JAX and in PyTorch."""

import functools
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.config import RUNS, Config
from train.data import load_arrays
from train.figure1 import (
    NETWORKS,
    PERCENTILES,
    REPORT_EVERY,
    UNIT,
    load_digits,
    make_look,
    start_networks,
)
from train.parallel import simulate_devices
from train.sources import EMBEDDED
from train.step import first_state, make_train_step

ROUNDS = 15
FIGURE_STEPS = 50_000
IMPORT = """
import time, jax
start = time.perf_counter()
import bnjax
print(time.perf_counter() - start)
"""

Chunk = Callable[[], object]  # trains REPORT_EVERY steps and looks at the result
Way = Callable[[list[Config]], list[Chunk]]  # chunks that together train all


def run() -> str:
    """Returns a table in Markdown."""
    simulate_devices()
    ways: dict[str, Way] = {
        "bnjax, scanned on the device": scanned,
        "a jitted step, batches from the host": each(plain),
        "the matrix products alone, which no way can do without": products,
    }
    if find_torch():
        ways["PyTorch"] = each(pytorch)
    seconds = interleave(ways)
    ours = seconds["bnjax, scanned on the device"]
    rows = [f"| {name} | {chunk / ours:.1f} × |" for name, chunk in seconds.items()]
    lines = [
        f"Time of {REPORT_EVERY} steps of both networks of Figure 1, and a look at "
        f"accuracy and percentiles, over ours (medians of {ROUNDS} interleaved rounds)",
        "",
        "| way | time |",
        "| --- | --- |",
        *rows,
        "",
        f"`import bnjax` after `import jax`: {1000 * import_seconds():.0f} ms. "
        f"Embedded digits: {sample_bytes() / 1e6:.2f} MB.",
        "",
        f"`python -m benchmarks main_job` on {machine()}.",
    ]
    return "\n".join(lines)


def interleave(ways: dict[str, Way]) -> dict[str, float]:
    """Returns seconds of a chunk of both networks, the ways taking turns."""
    configs = [RUNS[run] for run in NETWORKS.values()]
    chunks = {name: way(configs) for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, pair in chunks.items():
            start = time.perf_counter()
            for chunk in pair:
                chunk()
            if turn:  # the first one compiles
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def each(way: Callable[[Config], Chunk]) -> Way:
    """Returns the way that trains one network after the other."""
    return lambda configs: [way(config) for config in configs]


def scanned(configs: list[Config]) -> list[Chunk]:
    """The program's own way: a dispatch for a chunk, networks side by side."""
    runs = start_networks(configs)
    for run in runs:
        next(run)  # the look before the first step
    return [lambda: jax.device_get([next(run) for run in runs])]


def products(configs: list[Config]) -> list[Chunk]:
    """The matrix products of the steps, networks side by side: no way is faster."""

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], None]:
        inputs = [x]
        for weight in weights:
            inputs.append(inputs[-1] @ weight)
        gradient, moved = inputs.pop(), []
        for weight, x in zip(reversed(weights), reversed(inputs), strict=True):
            moved.append(weight + 1e-9 * (x.T @ gradient))
            if len(moved) < len(weights):
                gradient = gradient @ weight.T
        return moved[::-1], None

    rng = np.random.default_rng(0)
    sizes = (784, 100, 100, 100, 10)
    weights = [rng.normal(0, 0.05, shape) for shape in itertools.pairwise(sizes)]
    batches = rng.normal(size=(REPORT_EVERY, configs[0].batch_size, sizes[0]))
    devices = itertools.cycle(jax.local_devices())
    arguments = [
        jax.device_put(jax.tree.map(np.float32, (weights, batches)), device)
        for _, device in zip(configs, devices, strict=False)
    ]
    block = jax.jit(functools.partial(jax.lax.scan, step))
    return [lambda: jax.block_until_ready([block(*each) for each in arguments])]


def plain(config: Config) -> Chunk:
    """A jitted step for each batch, which NumPy picks on the host."""
    images, labels = load_arrays(config.dataset, split="train")
    data = load_digits(config)
    step = jax.jit(make_train_step(config), donate_argnums=0)
    look = jax.jit(make_look(config))
    state = first_state(config)
    rng = np.random.default_rng(config.seed)

    def chunk() -> object:
        nonlocal state
        metrics = None
        for _ in range(REPORT_EVERY):
            rows = rng.integers(len(labels), size=config.batch_size)
            batch = {
                "image": jnp.asarray(images[rows]),
                "label": jnp.asarray(labels[rows]),
            }
            state, metrics = step(state, batch)
        # The loss is read once a chunk, which favours this way.
        return jax.device_get((metrics, look(state, data)))

    return chunk


def find_torch() -> bool:
    """Returns whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def pytorch(config: Config) -> Chunk:
    """The loop of any PyTorch tutorial, with the data in memory."""
    import torch  # type: ignore[import-not-found]  # an optional extra
    from torch import nn  # type: ignore[import-not-found]

    def tensors(split: str) -> tuple[Any, Any]:
        images, labels = load_arrays(config.dataset, split=split)
        flat = torch.tensor(images).reshape(len(labels), -1).float() / 127.5 - 1
        return flat, torch.tensor(labels).long()

    (images, labels), (test_images, test_labels) = tensors("train"), tensors("test")
    layers: list[Any] = []
    for inputs in (784, 100, 100):
        norm = [nn.BatchNorm1d(100)] if config.batch_norm else []
        linear = nn.Linear(inputs, 100, bias=not config.batch_norm)
        layers += [linear, *norm, nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    loss_fn = nn.CrossEntropyLoss()
    levels = torch.tensor(PERCENTILES) / 100

    def chunk() -> object:
        model.train()
        for _ in range(REPORT_EVERY):
            rows = torch.randint(len(labels), (config.batch_size,))
            loss = loss_fn(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            inputs = model[:-2](test_images)
            logits = model[-2:](inputs)
            correct = (logits.argmax(-1) == test_labels).float().mean()
            return correct.item(), torch.quantile(inputs[:, UNIT], levels).tolist()

    return chunk


def import_seconds() -> float:
    """Returns what `import bnjax` adds to `import jax`, in a fresh process."""
    command = [sys.executable, "-c", IMPORT]
    runs = (
        subprocess.run(command, capture_output=True, check=True, text=True)
        for _ in range(ROUNDS)
    )
    return statistics.median(float(each.stdout) for each in runs)


def sample_bytes() -> int:
    """Returns the size of the digits that come with the program."""
    return sum(p.stat().st_size for p in Path(EMBEDDED).rglob("*") if p.is_file())


def machine(*packages: str) -> str:
    """Returns what the numbers hold for, with the versions of more packages."""
    names = ["jax", "flax", *(["torch"] if find_torch() else []), *packages]
    versions = (f"{name} {importlib.metadata.version(name)}" for name in names)
    python = f"Python {platform.python_version()}"
    cores = f"{len(os.sched_getaffinity(0))} {platform.machine()} cores"
    return ", ".join([cores, python, *versions])
