"""One call of a layer, which the Linen and the NNX module share."""

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact, Shaped

from bnjax.arguments import check_batch_stats, check_momentum
from bnjax.functional import normalize, normalize_batch
from bnjax.statistics import (
    BatchStats,
    CountedBatchStats,
    Moments,
    debias_batch_stats,
)
from bnjax.transform import Renorm, promote


def counts_calls(module: Any) -> bool:
    """Returns whether a module's running values go with a count of its calls."""
    return module.momentum is None or module.debias


def stored_batch_stats(module: Any, values: dict[str, Array]) -> Any:
    """Returns running values as `update_batch_stats` takes them."""
    kind = CountedBatchStats if counts_calls(module) else BatchStats
    return kind(**values)


def call_layer(
    module: Any,
    x: Shaped[Array, "..."],
    batch_stats: BatchStats | CountedBatchStats,
    *,
    scale: Inexact[Array, "..."] | None,
    bias: Inexact[Array, "..."] | None,
    use_running_average: bool,
    mask: Shaped[Array, "..."] | None,
    renorm: Renorm | None,
    dtype: Any,
    single: Literal["error", "warning", "fine"],
    starting: bool = False,
) -> tuple[Inexact[Array, "..."], Moments | None]:
    """Returns `y` in `dtype`, and the moments of the batch unless in evaluation.

    Args:
      module: Has the attributes of `bnjax.linen.BatchNorm`.
      x: As in `batch_norm`, or integers.
      batch_stats: Running values as they are stored.
      scale: γ, as in `batch_norm`; and so are the arguments below.
      bias: β.
      use_running_average: Static.
      mask: True where an element counts.
      renorm: For training.
      dtype: Of the result.
      single: Static. What one element per feature is, which is normalized to β.
      starting: Static. While initializing no axis needs to be bound.
    """
    check_momentum(module.momentum)
    check_batch_stats(batch_stats)
    if module.debias:
        assert isinstance(batch_stats, CountedBatchStats)
        batch_stats = debias_batch_stats(batch_stats, module.momentum)
    options: dict[str, Any] = {
        "scale": scale,
        "bias": bias,
        "epsilon": module.epsilon,
        "feature_axes": module.axis,
        "mask": _as_flax(mask, x.shape),
    }
    x = x.astype(promote(x.dtype, dtype))
    if use_running_average:
        y = normalize(x, batch_stats.mean, batch_stats.var, **options)
        return y.astype(dtype), None
    y, moments = normalize_batch(
        x,
        batch_stats,
        axis_name=None if starting else module.axis_name,
        axis_index_groups=None if starting else module.axis_index_groups,
        virtual_batch_size=None if starting else module.virtual_batch_size,
        renorm=renorm,
        two_pass=not module.use_fast_variance,
        single=single,
        **options,
    )
    return y.astype(dtype), moments


def _as_flax(mask: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Returns a mask that fits `x` at its last axes alone, where Flax aligns it."""
    if mask is None or not 0 < mask.ndim < len(shape):
        return mask

    def fits(part: tuple[int, ...]) -> bool:
        return all(n in (1, m) for n, m in zip(mask.shape, part, strict=True))

    if fits(shape[: mask.ndim]) or not fits(shape[-mask.ndim :]):
        return mask
    return lax.expand_dims(mask, range(len(shape) - mask.ndim))


def result_dtype(dtype: Any, *values: Any) -> Any:
    """Returns `dtype`, or else what the values promote to, by the rule of Flax."""
    if dtype is not None:
        return jnp.dtype(dtype)
    dtype = promote(*(value.dtype for value in values if value is not None))
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return dtype if inexact else promote(dtype, jnp.float32)
