"""Layers that Flax lacks, or that XLA runs slowly as Flax writes them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

LRN_SIZE, LRN_ALPHA, LRN_BETA = 5, 1e-4, 0.75  # GoogLeNet's


def normalize_activations(
    x: jax.Array,
    norm: Callable[..., nn.Module],
    *,
    name: str,
    train: bool,
    dtype: Any = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Returns `x` through a new submodule `norm`; call it in a compact method.

    Args:
      x: `(N, ..., C)`; floating dtype.
      norm: Constructor with the arguments of Flax's `BatchNorm`.
      name: Static. Name of the submodule.
      train: Static. True: statistics of the batch. False: running averages.
      dtype: Static. Dtype of the result. None: `norm` decides.
      mask: `(N,)`, True where an example counts. None: `norm` never sees a mask.
    """
    dtypes = {} if dtype is None else {"dtype": dtype}
    # All axes of x: Flax's module would align a lone (N,) with the channels.
    masks = {} if mask is None else {"mask": per_example(mask, x)}
    return norm(name=name, **dtypes)(x, use_running_average=not train, **masks)


def per_example(mask: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a `(N,)` mask as `(N, 1, ...)`, of the rank of `x`."""
    return mask.reshape(len(x), *[1] * (x.ndim - 1))


def zero_masked(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns `x` with zeros where the `(N,)` mask is False, whatever was there."""
    # A NaN in a padded row would reach the first kernel's gradient, as 0 · NaN.
    return x if mask is None else jnp.where(per_example(mask, x), x, 0)


# Keeps x alone for the gradient, not the two maxima of each axis.
@functools.partial(jax.checkpoint, static_argnums=(1, 2))
def max_pool(x: jax.Array, stride: int, padding: tuple[tuple[int, int], ...]):
    """Returns the maxima of 3×3 windows, one axis after the other.

    Faster on CPUs than `nn.max_pool`, whose gradient is a scatter. A maximum that
    occurs k times in a window shares its gradient among the k, in parts that add up
    to one; `nn.max_pool` gives one all.

    Args:
      x: `(N, H, W, C)`; real floating dtype.
      stride: Static. Step between windows, 1 or 2.
      padding: Static. `((low, high), (low, high))` for H and W, each at most 2.

    Returns:
      `(N, H', W', C)` of the dtype of `x`, H' = ⌊(H + low + high − 3) / stride⌋ + 1.

    >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    >>> max_pool(x, 2, ((0, 1), (0, 1))).squeeze()
    Array([[10., 11.],
           [14., 15.]], dtype=float32)
    """
    for axis, pad in zip((1, 2), padding, strict=True):
        first, second, third = _shifted(x, axis, stride, pad, fill=-jnp.inf)
        x = jnp.maximum(jnp.maximum(first, second), third)
    return x


def average_pool(x: jax.Array) -> jax.Array:
    """Returns the means of 3×3 windows at stride 1; padding counts, as zeros.

    Faster on CPUs than `nn.avg_pool`, value and gradient.

    Args:
      x: `(N, H, W, C)`; floating dtype.

    Returns:
      Same shape and dtype: the sum over each window, divided by 9 also at borders.

    >>> average_pool(jnp.full((1, 3, 3, 1), 9.0)).squeeze()
    Array([[4., 6., 4.],
           [6., 9., 6.],
           [4., 6., 4.]], dtype=float32)
    """
    for axis in (1, 2):
        first, second, third = _shifted(x, axis, 1, (1, 1), fill=0.0)
        x = first + second + third
    return x / 9


def _shifted(x, axis: int, stride: int, pad: tuple[int, int], fill: float):
    """Returns the first, second and third elements of the windows along `axis`."""
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (*pad, 0)
    x = lax.pad(x, jnp.array(fill, x.dtype), widths)
    span = (x.shape[axis] - 3) // stride * stride + 1
    return [lax.slice_in_dim(x, k, k + span, stride, axis) for k in range(3)]


def local_response_norm(x: jax.Array) -> jax.Array:
    """Returns x / (1 + α/5 · Σ x²)^β, summed over 5 neighbouring channels.

    GoogLeNet's normalization, with its α = 1e-4 and β = 0.75, that BN makes
    unnecessary (Section 4.2.1).

    Args:
      x: `(..., C)`; real floating dtype. Channels past either end count as 0.

    Returns:
      Same shape and dtype.

    >>> local_response_norm(jnp.full((1, 1), 100.0)).round(2)
    Array([[87.22]], dtype=float32)
    """
    # bfloat16 would round 1 + α/5 · Σ x² to 1 for every Σ x² below 195.
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    half, channels = LRN_SIZE // 2, x.shape[-1]
    padded = jnp.pad(jnp.square(wide), [(0, 0)] * (x.ndim - 1) + [(half, half)])
    total = sum(padded[..., k : k + channels] for k in range(LRN_SIZE))
    return (wide * (1 + LRN_ALPHA / LRN_SIZE * total) ** -LRN_BETA).astype(x.dtype)


class ExampleDropout(nn.Module):
    """Dropout whose noise does not depend on how many devices share the batch.

    Each example draws from a key of its own: the "dropout" key and the example's
    row in the global batch. `nn.Dropout` would give every device the same noise.

    Attributes:
      rate: Probability in [0, 1) that an element becomes 0.
      axis_name: Mapped axis (or tuple of axes) that the batch is split over in equal
        parts, in order. None: `x` is the whole batch.
    """

    rate: float
    axis_name: str | tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Returns `x` `(N, ...)`, in training with zeros and the rest scaled up.

        Raises:
          ValueError: `rate` lies outside [0, 1).
        """
        if not 0 <= self.rate < 1:
            raise ValueError(
                f"dropout rate {self.rate} lies outside [0, 1): it is the share of "
                "elements that become 0, and some must remain."
            )
        if not train or self.rate == 0:
            return x
        key = self.make_rng("dropout")
        row = jnp.arange(len(x))
        if self.axis_name is not None and not self.is_initializing():
            row += lax.axis_index(self.axis_name) * len(x)

        def keep(row):
            row_key = jax.random.fold_in(key, row)
            return jax.random.bernoulli(row_key, 1 - self.rate, x.shape[1:])

        return jnp.where(jax.vmap(keep)(row), x / (1 - self.rate), 0)
