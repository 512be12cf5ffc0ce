"""What the functions accept: checks, and shapes that line up with `x`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Inexact

from bnjax.reduction import Reduction, feature_shape, keep_valid
from bnjax.transform import compute_dtype

Scalar = float | int | Float[Array, ""]


def check_inexact(x: Any) -> None:
    """Raises unless `x` is of a floating or complex dtype."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"x has dtype {x.dtype}, but statistics need a floating or complex one. "
            "Convert first: x.astype(jnp.float32)."
        )


def check_batch_stats(batch_stats: Any) -> None:
    """Raises when running values are too coarse to move."""
    for name, value in zip(("mean", "var"), batch_stats, strict=True):
        if value.dtype in (jnp.float16, jnp.bfloat16):
            raise TypeError(
                f"batch_stats.{name} has dtype {value.dtype}, in which a running "
                "average stalls. Keep batch_stats in float32, also beside parameters "
                "in half precision."
            )


def check_momentum(momentum: Any) -> None:
    """Raises when a momentum that is known while tracing lies outside [0, 1]."""
    if not isinstance(momentum, Tracer) and not 0 <= float(momentum) <= 1:
        raise ValueError(
            f"momentum={momentum} is the weight of the old running value and must lie "
            "in [0, 1]. PyTorch's momentum is one minus this."
        )


def per_feature(
    value: Array, x: Array, reduction: Reduction, name: str
) -> Inexact[Array, "..."]:
    """Returns a value per feature, of the rank of `x`."""
    features = feature_shape(x.shape, reduction)
    if value.shape != features:
        raise ValueError(
            f"{name} has shape {value.shape}, but x of shape {x.shape} has features "
            f"{features} in the axes that are not reduced, {reduction.axes}. Check "
            "feature_axes."
        )
    return lax.expand_dims(value, reduction.axes)


def affine_parameter(
    value: Array | None,
    default: int,
    x: Array,
    reduction: Reduction,
    name: str,
    mask: Array | None,
) -> Inexact[Array, "..."]:
    """Returns a scale or bias of the rank of `x`, in the dtype of arithmetic on `x`."""
    dtype = compute_dtype(x.dtype)
    if value is None:
        return jnp.full((1,) * x.ndim, default, dtype)
    features = feature_shape(x.shape, reduction)
    if value.shape == features:
        return lax.expand_dims(value.astype(dtype), reduction.axes)
    if value.ndim == x.ndim and all(
        n in (1, size) for n, size in zip(value.shape, x.shape, strict=True)
    ):
        return _keep_used(value.astype(dtype), mask)
    raise ValueError(
        f"{name} has shape {value.shape}, but x has shape {x.shape}. It must have the "
        f"shape of the features, {features}, or the rank of x and broadcast to it."
    )


def _keep_used(value: Array, mask: Array | None) -> Array:
    """Returns a value of the rank of `mask` with zeros where it meets nothing valid."""
    if mask is None:
        return value
    # Computed per example, it may be NaN in padding, and gradients take 0 · NaN.
    shared = tuple(axis for axis, n in enumerate(value.shape) if n == 1)
    return keep_valid(value, mask.any(shared, keepdims=True))
