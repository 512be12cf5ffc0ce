"""Errors of batch normalization in training, beside those of other libraries."""

import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import bnjax.linen
from benchmarks.main_job import machine

SHAPE = (64, 8, 8, 16)  # (N, H, W, C): 4096 elements of each of 16 features
FEATURES = SHAPE[-1]
EPSILON = 1e-5
STEPS = 2_000  # 0.99 to that power leaves 2e-9 of the 0 where the running mean began
BATCHES = 20  # the steps go round them
BOUND = 1e-5
ROUNDING = 4 * float(np.finfo(np.float32).eps)  # two errors below it are equal


class Case(NamedTuple):
    """A kind of input: normal, or constant where `std` is 0."""

    name: str
    mean: float
    std: float
    dtype: Any = np.float32
    bounded: bool = True  # its errors shall be below BOUND


class Result(NamedTuple):
    """What a layer makes of a batch; in float64, the features last."""

    var: np.ndarray  # σ², biased
    y: np.ndarray
    dx: np.ndarray


class Errors(NamedTuple):
    """The largest error of each; NaN where it is one."""

    var: float  # relative, to ε where the variance is 0
    y: float  # over the largest |y|, or absolute where all are 0
    dx: float  # over the largest |∂ℓ/∂x|


Way = Callable[[Case, np.ndarray, np.ndarray], Result]  # of `x` and ∂ℓ/∂y
Start = Callable[[Case], jax.Array]  # the running mean before the batch

CASES = (
    *(Case(f"mean/std {mean}", float(mean), 1) for mean in ("1", "1e2", "1e4", "1e6")),
    *(Case(f"constant {c}", float(c), 0) for c in ("3", "1000.1", "12345.678", "1e7")),
    Case("mean 3, std 1e-3", 3, 1e-3),
    Case("std 1e18", 0, 1e18),
    Case("std 1e20, whose square overflows", 0, 1e20, bounded=False),
    Case("float16, mean 6e4, std 100", 6e4, 100, np.float16, bounded=False),
    Case("bfloat16, mean 100, std 1", 100, 1, ml_dtypes.bfloat16, bounded=False),
)


def run() -> str:
    """Returns a table in Markdown."""
    errors = measure()
    ways = list(errors[CASES[0].name])
    absent = [name for name in OPTIONAL if name not in ways]
    others = [OPTIONAL[name][1] for name in ("Haiku", "Equinox") if name in ways]
    lines = [
        "Largest errors of var / y / ∂ℓ/∂x in training, against float64: relative, "
        "var to ε where it is 0, y and ∂ℓ/∂x to the largest, or to 1 where all are 0",
        "",
        f"| {' | '.join(['input', *ways])} |",
        f"|{' --- |' * (1 + len(ways))}",
        *(row(name, list(each.values())) for name, each in errors.items()),
        "",
        f"Features of {np.prod(SHAPE[:-1])} values; float32 unless said. Trained: with "
        f"the running mean of {STEPS} steps before, momentum 0.99. PyTorch has its "
        "features first, where its sums are the most accurate.",
        *([f"Not installed, so left out: {', '.join(absent)}."] if absent else []),
        "",
        f"`python -m benchmarks accuracy` on {machine(*others)}.",
    ]
    return "\n".join(lines)


def row(name: str, errors: list[Errors]) -> str:
    """Returns a line of the table."""
    cells = [" / ".join(map(short, each)) for each in errors]
    return f"| {' | '.join([name, *cells])} |"


def short(error: float) -> str:
    """Returns the error with one digit."""
    if not np.isfinite(error):
        return "NaN" if np.isnan(error) else "∞"
    digit, exponent = f"{error:.0e}".split("e")
    return f"{digit}e{int(exponent)}" if error else "0"


def faults() -> list[str]:
    """Returns in which cells bnjax is less accurate than it has to be."""
    return [fault for case in CASES for fault in judge(case, measure()[case.name])]


def judge(case: Case, errors: dict[str, Errors]) -> Iterator[str]:
    """Yields what of one input is not as good as the best peer, or above BOUND."""
    peers = [each for name, each in errors.items() if name not in OURS]
    for name, part in ((name, part) for name in OURS for part in Errors._fields):
        error = getattr(errors[name], part)
        # fmin passes over NaN.
        best = np.fmin.reduce([getattr(peer, part) for peer in peers], initial=np.inf)
        cell = f"{case.name}, {name}: the error of {part} is {error:.1e}"
        if not error <= max(best, rounding(case, part)):
            yield f"{cell}, of the best peer {best:.1e}"
        if case.bounded and not error < BOUND:
            yield f"{cell}, not below {BOUND:.0e}"


def rounding(case: Case, part: str) -> float:
    """Returns an error that no algorithm can be blamed for."""
    if part == "var" or case.dtype == np.float32:
        return ROUNDING
    return float(ml_dtypes.finfo(case.dtype).eps) / 2  # `y` and `dx` are that narrow


@functools.cache
def measure() -> dict[str, dict[str, Errors]]:
    """Returns the errors of every input and way."""
    missing = {n for n, (module, _) in OPTIONAL.items() if not find_spec(module)}
    names = [name for name in WAYS if name not in missing]
    return {case.name: errors_of(case, names) for case in CASES}


def errors_of(case: Case, names: list[str]) -> dict[str, Errors]:
    """Returns the errors of each way, all given the same input."""
    rng = np.random.default_rng(0)
    x, dy = draw(case, rng), rng.normal(size=SHAPE).astype(case.dtype)
    right = oracle(x, dy)
    return {name: compare(WAYS[name](case, x, dy), right) for name in names}


def draw(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Returns a batch, rounded as a layer is given it."""
    return (case.mean + case.std * rng.normal(size=SHAPE)).astype(case.dtype)


def oracle(x: np.ndarray, dy: np.ndarray) -> Result:
    """Returns Algorithm 1 and the gradient of Section 3, in float64."""
    x, dy = (value.astype(np.float64) for value in (x, dy))
    average = functools.partial(np.mean, axis=(0, 1, 2))
    z = x - average(x)
    z -= average(z)  # the mean is rounded too
    var = average(z**2)
    r = 1 / np.sqrt(var + EPSILON)
    return Result(var, z * r, r * (dy - average(dy) - z * r**2 * average(z * dy)))


def compare(result: Result, right: Result) -> Errors:
    """Returns the largest errors."""
    scales = (
        np.where(right.var > 0, right.var, EPSILON),
        np.max(np.abs(right.y)) or 1.0,
        np.max(np.abs(right.dx)),
    )
    with np.errstate(invalid="ignore"):
        pairs = zip(result, right, scales, strict=True)
        return Errors(*(float(np.max(np.abs(a - b) / scale)) for a, b, scale in pairs))


def linen(norm: Any, start: Start | None = None, **options: Any) -> Way:
    """Returns the way of a module like Flax's; without `start`, of a new layer."""

    def way(case: Case, x: np.ndarray, dy: np.ndarray) -> Result:
        layer = norm(
            use_running_average=False,
            momentum=0.0,  # the running variance becomes the batch's
            epsilon=EPSILON,
            dtype=case.dtype,
            **options,
        )
        variables = layer.init(jax.random.key(0), jnp.asarray(x))
        if start:
            stats = variables["batch_stats"] | {"mean": start(case)}
            variables = variables | {"batch_stats": stats}

        def apply(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, new = layer.apply(variables, x, mutable=["batch_stats"])
            return y, new["batch_stats"]["var"]

        return differentiate(apply, x, dy)

    return way


def differentiate(apply: Callable, x: np.ndarray, dy: np.ndarray) -> Result:
    """Returns the result of a JAX function of `x` that gives `y` and `var`."""

    @jax.jit
    def both(x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull, var = jax.vjp(apply, x, has_aux=True)
        return var.reshape(FEATURES), y, pull(dy.astype(y.dtype))[0]

    return Result(*(np.asarray(value).astype(np.float64) for value in both(x, dy)))


def trained(case: Case) -> jax.Array:
    """Returns the running mean after some training on inputs of the same kind."""
    rng = np.random.default_rng(1)
    return train(np.stack([draw(case, rng) for _ in range(BATCHES)]))


@jax.jit
def train(batches: jax.Array) -> jax.Array:
    """Returns the running mean after STEPS batches, over and over the given ones."""
    layer = bnjax.linen.BatchNorm(use_running_average=False)
    variables = layer.init(jax.random.key(0), batches[0])

    def step(variables: Any, i: jax.Array) -> tuple[Any, None]:
        _, new = layer.apply(variables, batches[i % BATCHES], mutable=["batch_stats"])
        return variables | new, None

    variables, _ = jax.lax.scan(step, variables, jnp.arange(STEPS))
    return variables["batch_stats"]["mean"]


def haiku(case: Case, x: np.ndarray, dy: np.ndarray) -> Result:
    """The way of Haiku."""
    import haiku as hk  # type: ignore[import-not-found]  # an optional extra

    def call(x: jax.Array) -> jax.Array:
        layer = hk.BatchNorm(True, True, decay_rate=0.0, eps=EPSILON)
        return layer(x, is_training=True)

    layer = hk.transform_with_state(call)
    params, state = layer.init(None, x)

    def apply(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, new = layer.apply(params, state, None, x)
        return y, new["batch_norm/~/var_ema"]["average"]

    return differentiate(apply, x, dy)


def equinox(case: Case, x: np.ndarray, dy: np.ndarray) -> Result:
    """The way of Equinox, whose layer sees one example, features first."""
    from equinox import nn  # type: ignore[import-not-found]  # an optional extra

    make = nn.make_with_state(nn.BatchNorm)
    layer, state = make(FEATURES, "batch", momentum=0.0, eps=EPSILON, mode="batch")
    running: Any = layer.batch_state_index

    def apply(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        call = jax.vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        y, new = call(jnp.moveaxis(x, -1, 1), state)
        return jnp.moveaxis(y, 1, -1), new.get(running)[1]

    return differentiate(apply, x, dy)


def pytorch(case: Case, x: np.ndarray, dy: np.ndarray) -> Result:
    """The way of PyTorch on the CPU, features first."""
    import torch  # type: ignore[import-not-found]  # an optional extra

    def tensor(value: np.ndarray) -> Any:
        first = np.ascontiguousarray(np.moveaxis(value.astype(np.float32), -1, 1))
        return torch.tensor(first).to(getattr(torch, np.dtype(case.dtype).name))

    def array(value: Any) -> np.ndarray:
        wide = value.detach().double().numpy()
        return wide if wide.ndim == 1 else np.moveaxis(wide, 1, -1)

    layer = torch.nn.BatchNorm2d(FEATURES, momentum=1.0, eps=EPSILON)
    inputs = tensor(x).requires_grad_()
    y = layer(inputs)
    y.backward(tensor(dy))
    unbiased, m = array(layer.running_var), np.prod(SHAPE[:-1])
    return Result(unbiased * (m - 1) / m, array(y), array(inputs.grad))


OURS: dict[str, Way] = {
    "bnjax, trained": linen(bnjax.linen.BatchNorm, trained, unbiased=False),
    "bnjax, first step": linen(bnjax.linen.BatchNorm, unbiased=False),
}
WAYS: dict[str, Way] = OURS | {
    "Flax": linen(flax.linen.BatchNorm),
    "Flax, slow variance": linen(flax.linen.BatchNorm, use_fast_variance=False),
    "Haiku": haiku,
    "Equinox": equinox,
    "PyTorch": pytorch,
}
OPTIONAL = {  # the module and the package of each
    "Haiku": ("haiku", "dm-haiku"),
    "Equinox": ("equinox", "equinox"),
    "PyTorch": ("torch", "torch"),
}
