"""What the functions accept: checks, and shapes that line up with `x`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Inexact

from bnjax.reduction import Reduction, feature_shape, keep_valid
from bnjax.transform import Correction, Renorm, compute_dtype


def check_inexact(x: Any) -> None:
    """Raises unless `x` is of a floating or complex dtype."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"x has dtype {x.dtype}, but statistics need a floating or complex one. "
            "Convert first: x.astype(jnp.float32)."
        )


def check_batch_stats(batch_stats: Any) -> None:
    """Raises when running values are too coarse to move."""
    for name, value in zip(("mean", "var"), batch_stats[:2], strict=True):
        if value.dtype in (jnp.float16, jnp.bfloat16):
            raise TypeError(
                f"batch_stats.{name} has dtype {value.dtype}, in which a running "
                "average stalls. Keep batch_stats in float32, also beside parameters "
                "in half precision."
            )


def check_var(var: Any) -> None:
    """Raises when a variance that is known by now is negative or NaN."""
    if isinstance(var, Tracer):
        return
    wrong = np.flatnonzero(~(np.asarray(var) >= 0))
    if wrong.size:
        raise ValueError(
            f"var is {np.ravel(var)[wrong[0]]} in feature {wrong[0]} (and {wrong.size} "
            "in all are negative or NaN). Were running values loaded from another "
            "framework with epsilon inside, or poisoned by a NaN in training? Estimate "
            "them anew, or load them again."
        )


def check_momentum(momentum: Any) -> None:
    """Raises when a momentum that is known while tracing lies outside [0, 1]."""
    if momentum is None or isinstance(momentum, Tracer):
        return
    if not 0 <= float(momentum) <= 1:
        raise ValueError(
            f"momentum={momentum} is the weight of the old running value and must lie "
            "in [0, 1]. PyTorch's momentum is one minus this."
        )


def check_virtual_batch_size(
    size: int | None, shape: tuple[int, ...], reduction: Reduction
) -> None:
    """Raises unless groups of `size` examples can be formed."""
    if size is None:
        return
    if size < 1 or not shape or 0 not in reduction.axes:
        raise ValueError(
            f"virtual_batch_size={size} must be at least 1, and groups examples along "
            f"axis 0, which must not be a feature axis (x has shape {shape})."
        )
    if reduction.axis_name is not None and size > shape[0] > 0:
        raise ValueError(
            f"virtual_batch_size={size} is more than the {shape[0]} examples of this "
            "device, and a virtual batch does not reach over devices. Take a smaller "
            "one; or None, and axis_index_groups or an axis of the mesh to share among "
            "some devices."
        )


def check_varying(shift: Any, axis_name: Any) -> None:
    """Raises when JAX knows that a running mean differs between the devices."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    # Known under shard_map with check_vma; the type has no such part elsewhere.
    manual = getattr(jax.typeof(shift), "mat", None)
    varying = sorted(set(names) & set(getattr(manual, "varying", ())))
    if varying:
        raise ValueError(
            f"batch_stats differ between the devices of {varying}, over which "
            f"axis_name={axis_name!r} sums: they would add up sums about different "
            "means. Pass the same to all (in_specs P()): those of one device, or what "
            "merge_moments makes of all if they were not synchronized so far."
        )


def make_correction(
    renorm: Renorm | None, x: Array, mean: Array, var: Array
) -> Correction | None:
    """Returns the correction towards running values, both of the rank of `x`."""
    if renorm is None:
        return None
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"renorm is for real input; x has dtype {x.dtype}.")
    for name, value, least in zip(("r_max", "d_max"), renorm, (1, 0), strict=True):
        if not isinstance(value, Tracer) and not float(value) >= least:
            raise ValueError(
                f"renorm.{name}={value} must be at least {least}. r_max=1 and d_max=0 "
                "correct nothing, as in the first steps of a schedule."
            )
    r_max, d_max = (jnp.asarray(value, var.dtype) for value in renorm)
    return Correction(r_max, d_max, mean, var)


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
    if 0 in reduction.axes and value.shape == (x.shape[0], *features):
        each = lax.expand_dims(value.astype(dtype), reduction.axes[1:])
        return _keep_used(each, mask)
    if value.ndim == x.ndim and all(
        n in (1, size) for n, size in zip(value.shape, x.shape, strict=True)
    ):
        return _keep_used(value.astype(dtype), mask)
    raise ValueError(
        f"{name} has shape {value.shape}, but x has shape {x.shape}. It must have the "
        f"shape of the features, {features}, for each example {(len(x), *features)}, "
        "or the rank of x and broadcast to it."
    )


def _keep_used(value: Array, mask: Array | None) -> Array:
    """Returns a value of the rank of `mask` with zeros where it meets nothing valid."""
    if mask is None:
        return value
    # Computed per example, it may be NaN in padding, and gradients take 0 · NaN.
    shared = tuple(axis for axis, n in enumerate(value.shape) if n == 1)
    return keep_valid(value, mask.any(shared, keepdims=True))
