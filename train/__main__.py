"""The command line: parse, pick a config, call."""

import contextlib
import dataclasses
import io
import itertools
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from train.config import RUNS, Config, RunError
from train.data import DataError
from train.stop import Interrupted

USAGE = """\
usage: python -m train [options]            the main job: Figure 1, then two networks
       python -m train fit RUN [options]    train a named run on every device
       python -m train evaluate W           top-1 and top-5 error of the run in W
       python -m train figure 1 [options]   one figure of the paper
Each has --help."""

HELP = {"-h", "--help"}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Trains a named run on every device; goes on where its workdir stopped."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    workdir: Path | None = None
    """Where the run is kept; None: runs/RUN-DATASET."""
    multi_process: bool = False
    """One of several processes, which find one another through the cluster (Slurm, MPI,
    Cloud TPU) or through JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Prints top-1 and top-5 error of a run; every example counts exactly once."""

    workdir: tyro.conf.Positional[Path]
    """Of the run."""
    checkpoint: Literal["latest", "best"] = "latest"
    """The newest, or the one of best accuracy."""
    data_dir: str | None = None
    """Folder of TensorFlow Datasets; None: the run's."""
    split: str | None = None
    """Such as "test" or "train[:17]"; None: the data set's own for evaluation."""
    batch_size: int | None = None
    """Global; None: the run's."""


@dataclasses.dataclass(frozen=True)
class Figure1:
    """Trains the networks of Section 4.1 on digits and draws the paper's Figure 1."""

    dataset: Literal["mnist_subset", "mnist"] = "mnist_subset"
    """The 8 000 digits that come with the program, or all 60 000."""
    data_dir: str | None = None
    """Folder of TensorFlow Datasets; None: its default."""
    num_steps: int = 50_000
    """Of each network."""
    seed: int = 0
    """Of parameters and order of examples."""
    workdir: Path | None = None
    """Takes figure1.png and metrics.jsonl; None: runs/figure1-DATASET."""


@dataclasses.dataclass(frozen=True)
class Demo:
    """The main job: Figure 1, then inception and bn_x5 in small on the same digits."""

    only: Literal["figure1", "networks"] | None = None
    """One of the two parts."""
    dataset: Literal["mnist_subset", "mnist"] = "mnist_subset"
    """The 8 000 digits that come with the program, or all 60 000."""
    data_dir: str | None = None
    """Folder of TensorFlow Datasets; None: its default."""
    num_steps: int = 50_000
    """Of each network of Figure 1."""
    network_steps: int = 200
    """Of inception and bn_x5."""
    seed: int = 0
    """Of parameters and order of examples."""
    workdir: Path | None = None
    """Takes figure1.png and the records; None: runs/demo-DATASET."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except Interrupted as stopped:
        # Every process stops here, so they end together.
        print(stopped, file=sys.stderr)
        return 143
    except (RunError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    if jax.distributed.is_initialized():
        # The shutdown barrier would wait 100 s for processes that may be gone.
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(argv: list[str]) -> int:
    command = argv[0] if argv and not argv[0].startswith("-") else ""
    rest = argv[1:] if command else argv
    commands: dict[str, Any] = {
        "": _demo,
        "fit": _fit,
        "evaluate": _evaluate,
        "figure": _figure,
    }
    if command not in commands:
        known = ", ".join(name for name in commands if name)
        raise RunError(f"There is no command {command!r}. Commands: {known}.")
    return commands[command](rest)


def _parse(kind: Any, argv: list[str], prog: str, **options: Any) -> Any:
    """Returns the options in `argv`; the parser's message is one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=argv, prog=prog, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        # A box in Unicode or ASCII: title, message, rule, and where to find help.
        lines = [line.strip("│ ") for line in said.getvalue().splitlines()[1:]]
        parts = itertools.groupby(lines, lambda line: not line.strip("─╰╯-"))
        message = next(" ".join(part) for is_rule, part in parts if not is_rule)
        message = message.rstrip(".")
        if "Unrecognized" in message and prog.endswith("fit"):
            fields = ", ".join(field.name for field in dataclasses.fields(Config))
            message += f". Fields of a run: {fields}"
        raise RunError(f"{message}. See {prog} --help.") from None


def _demo(argv: list[str]) -> int:
    options = _parse(Demo, argv, "python -m train", description=USAGE)
    from train.demo import run_demo

    run_demo(**vars(options))
    return 0


def _fit(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if name not in RUNS and not HELP & set(argv):
        raise RunError(f"There is no run {name!r}. Runs: {', '.join(RUNS)}.")
    defaults = {name: Fit(config) for name, config in RUNS.items()}
    runs = tyro.extras.subcommand_type_from_defaults(defaults)
    options = _parse(runs, argv, "python -m train fit")
    if options.multi_process:
        _join_processes()
    from train.loop import train

    config = options.config
    workdir = options.workdir or Path("runs") / f"{name}-{config.dataset}"
    result = train(config, workdir, name=name)
    if jax.process_index() == 0:
        done = f"{name} after {config.num_steps} steps"
        print(f"{done}: {_errors(result)}; kept in {workdir}")
    return 0


def _join_processes() -> None:
    """Makes this process one of several; JAX itself reads but the address."""
    try:
        numbers: dict[str, Any] = {
            name: int(os.environ[f"JAX_{name.upper()}"])
            for name in ("num_processes", "process_id")
            if f"JAX_{name.upper()}" in os.environ
        }
        jax.distributed.initialize(**numbers)
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"--multi-process: {error} Outside a cluster set JAX_COORDINATOR_ADDRESS "
            "(host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        ) from error


def _evaluate(argv: list[str]) -> int:
    options = _parse(Evaluate, argv, "python -m train evaluate")
    from train.evaluation import evaluate

    step, result = evaluate(**vars(options))
    print(f"step {step}: {_errors(result)}")
    return 0


def _figure(argv: list[str]) -> int:
    number, rest = (argv[0], argv[1:]) if argv else ("", [])
    if number in HELP:
        number, rest = "1", [number]
    if number != "1":
        raise RunError(f"There is no figure {number!r}. Figures: 1.")
    options = _parse(Figure1, rest, "python -m train figure 1")
    from train.figure1 import run_figure1
    from train.parallel import simulate_devices

    simulate_devices()
    run_figure1(**vars(options))
    return 0


def _errors(result: dict[str, float]) -> str:
    top1, top5 = (100 * (1 - result[name]) for name in ("accuracy", "accuracy_top5"))
    return f"top-1 error {top1:.2f} %, top-5 error {top5:.2f} %, n = {result['count']}"


if __name__ == "__main__":
    sys.exit(main())
