"""The batch-normalizing transform of Algorithm 1 on arrays, and its derivative.

Every statistic here has the rank of `x`, with 1 in the reduced axes ("kept" below).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Inexact

from bnjax.reduction import (
    Reduction,
    all_reduce,
    axis_size,
    keep_valid,
    local_count,
    static_global_count,
)

# Sums about a shift that is q standard deviations away lose 1.5e-7 · q² of the
# variance in float32: 2.4e-6 at q = 4, less than the reader of a result can see.
FAR = 4.0


Scalar = float | int | Float[Array, ""]


class Centred(NamedTuple):
    """Moments of `x` about a shift near its mean: μ is `shift + residual`.

    The two are kept apart, since their float32 sum is already off by 7e-4 standard
    deviations where the mean is 1e4 times the deviation.
    """

    shift: Inexact[Array, "..."]  # kept; the same on all devices
    residual: Inexact[Array, "..."]  # kept
    var: Float[Array, "..."]  # kept; σ², biased
    # kept or scalar; m over all devices; the name hides an idle method of tuple
    count: Float[Array, "..."]  # type: ignore[assignment]


class Renorm(NamedTuple):
    """How far Batch Renormalization may correct a batch (Ioffe 2017).

    Both may be traced, so that a schedule is data. 1 and 0 correct nothing.
    """

    r_max: Scalar  # at least 1; r = σ_batch / σ_running is clipped to [1/r_max, r_max]
    d_max: Scalar  # at least 0; d = (μ_batch − μ_running) / σ_running, to ±d_max


class Correction(NamedTuple):
    """Batch Renormalization of one call: limits, and running values to lean on."""

    r_max: Float[Array, ""]
    d_max: Float[Array, ""]
    mean: Inexact[Array, "..."]  # kept
    var: Float[Array, "..."]  # kept


class Spec(NamedTuple):
    """The static choices of one transform."""

    reduction: Reduction
    two_pass: bool = False  # never trust the shift


def promote(*dtypes: Any) -> Any:
    """Returns the dtype that holds all of them, also under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def compute_dtype(dtype: Any) -> Any:
    """Returns the dtype of arithmetic on inputs of `dtype`: float32 or wider."""
    # bfloat16 keeps 8 significant bits, too few to add up a batch.
    return promote(dtype, jnp.float32)


def centre(
    x: Inexact[Array, "..."],
    shift: Inexact[Array, "..."],
    mask: Bool[Array, "..."] | None,
    spec: Spec,
    floor: Float[Array, ""] | float = 0.0,
) -> Centred:
    """Returns the moments of `x`, by sums about `shift` where that is accurate.

    Args:
      x: float32 or wider.
      shift: Kept; a guess of the mean, the same on all devices.
      mask: Of the rank of `x`; True where an element counts.
      spec: Static.
      floor: A variance far below which relative accuracy does not matter.
    """
    first = _sums_about(x, shift, mask, spec.reduction)
    step = lax.stop_gradient(first.residual)
    if spec.two_pass:
        return _sums_about(x, shift + step, mask, spec.reduction)
    # Equal on all devices that sum together, as its inputs are: they agree on the
    # branch, and the all-reduce inside it is safe.
    # A variance that overflowed may do so about this shift alone.
    near = jnp.abs(first.residual) <= FAR * jnp.sqrt(first.var + floor)
    far = ~jnp.all(near & jnp.isfinite(first.var))
    shift = shift + jnp.where(far, step, jnp.zeros_like(step))
    residual, var = lax.cond(
        far,
        lambda: _sums_about(x, shift, mask, spec.reduction)[1:3],
        lambda: first[1:3],
    )
    return Centred(shift, residual, var, first.count)


def _sums_about(
    x: Array, shift: Array, mask: Array | None, reduction: Reduction
) -> Centred:
    """Returns the moments about `shift`: one read of `x` and one all-reduce."""
    z = keep_valid(x - shift, mask)
    count = static_global_count(x.shape, mask, reduction)
    # A power of two, which rounds nothing: the sum of squares must not overflow where
    # their mean does not.
    share = 2.0 ** -math.ceil(math.log2(max(_global_size(x.shape, reduction), 1)))
    sums = [_sum(z, reduction), _sum(abs_square(z) * share, reduction)]
    if count is None:
        local = lax.expand_dims(local_count(x.shape, mask, reduction), reduction.axes)
        sums.append(local)
    residual, square, *counts = _reduce(sums, z.dtype, reduction)
    m = counts[0].real if count is None else jnp.full((), count, square.real.dtype)
    residual, square = _divide(residual, m), _divide(square.real, m) / share
    var = square - abs_square(residual)
    return Centred(shift, residual, jnp.maximum(var, jnp.zeros((), var.dtype)), m)


def _global_size(shape: tuple[int, ...], reduction: Reduction) -> int:
    """Returns the elements per feature over all devices, masked ones included."""
    return math.prod(shape[axis] for axis in reduction.axes) * axis_size(reduction)


def _reduce(sums: list[Array], dtype: Any, reduction: Reduction) -> list[Array]:
    """Returns each sum over all devices, by one all-reduce."""
    total = all_reduce(jnp.stack([s.astype(dtype) for s in sums]), reduction)
    # Split, not indexed: the transpose then concatenates, and does not pad and add.
    return [part.squeeze(0) for part in lax.split(total, (1,) * len(sums))]


def _divide(total: Array, count: Array) -> Array:
    """Returns the mean; 0, not NaN, where nothing counts and the total is 0."""
    return total / jnp.maximum(count, jnp.ones_like(count)).astype(total.dtype)


def _sum(values: Array, reduction: Reduction) -> Array:
    """Returns the sum on this device, kept."""
    return values.sum(reduction.axes, keepdims=True)


def abs_square(z: Array) -> Array:
    """Returns |z|², real."""
    return _dot(z, z)


def _dot(a: Array, b: Array) -> Array:
    """Returns the real part of conj(a) · b."""
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        return a.real * b.real + a.imag * b.imag
    return a * b


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def batch_transform(
    spec: Spec,
    x: Inexact[Array, "..."],
    scale: Inexact[Array, "..."],
    bias: Inexact[Array, "..."],
    epsilon: Float[Array, ""],
    shift: Inexact[Array, "..."],
    mask: Bool[Array, "..."] | None,
    correction: Correction | None,
) -> tuple[Inexact[Array, "..."], Centred]:
    """Returns `x` normalized by its own batch (Algorithm 1), and the batch's moments.

    Args:
      spec: Static.
      x: The mini-batch; any inexact dtype.
      scale: γ, of the rank of `x` and broadcasting to it; float32 or wider.
      bias: β, likewise.
      epsilon: ε.
      shift: Kept; a guess of the mean that all devices share: the running mean.
      mask: Of the rank of `x`; True where an element counts.
      correction: Takes the result part of the way to the running values.

    Returns:
      `y` like `x`, 0 where masked out; and the moments.
    """
    return _transform(spec, x, scale, bias, epsilon, shift, mask, correction)


def _transform(
    spec: Spec,
    x: Array,
    scale: Array,
    bias: Array,
    epsilon: Array,
    shift: Array,
    mask: Array | None,
    correction: Correction | None,
) -> tuple[Array, Centred]:
    wide = keep_valid(x.astype(compute_dtype(x.dtype)), mask)
    # One running mean poisoned by a NaN must not spoil every batch that follows.
    shift = jnp.where(jnp.isfinite(shift), shift, jnp.zeros_like(shift))
    moments = centre(wide, lax.stop_gradient(shift), mask, spec, 0.01 * epsilon)
    if correction is not None:
        r, d = _renorm(moments, epsilon, correction)
        scale, bias = scale * r.astype(scale.dtype), bias + scale * d
    multiplier = scale * lax.rsqrt(moments.var + epsilon).astype(scale.dtype)
    y = affine(wide, moments, multiplier, bias)
    return keep_valid(y.astype(x.dtype), mask), moments


def _renorm(
    moments: Centred, epsilon: Array, correction: Correction
) -> tuple[Array, Array]:
    """Returns r and d of Batch Renormalization; constants to the gradient."""
    r_max, d_max, mean, var = correction
    running = jnp.sqrt(var + epsilon)
    r = jnp.clip(jnp.sqrt(moments.var + epsilon) / running, 1 / r_max, r_max)
    d = (moments.shift - mean) + moments.residual
    # The rule is differentiated again for second derivatives.
    return lax.stop_gradient((r, jnp.clip(d / running, -d_max, d_max)))


def affine(x: Array, moments: Centred, multiplier: Array, bias: Array) -> Array:
    """Returns (x − μ) · multiplier + bias, the subtraction first and in two steps."""
    return ((x - moments.shift) - moments.residual) * multiplier + bias


@batch_transform.defjvp
def _batch_transform_jvp(spec: Spec, primals: tuple, tangents: tuple) -> tuple:
    """The gradient of Section 3 with its three paths, as a linear map of tangents.

    By hand for memory: autodiff would keep x̂ in float32 beside `x`. As a JVP rule,
    since JAX transposes that by itself in each parallel mode, sums over devices
    included, and can differentiate it again.
    """
    x, scale, _, epsilon, _, mask, correction = primals
    y, moments = _transform(spec, *primals)
    # Rematerialized, so that what waits for the backward pass is `x` as it came.
    linear = jax.checkpoint(functools.partial(_tangents, spec), prevent_cse=False)
    t, scale_t, bias_t, epsilon_t = tangents[:4]
    if correction is not None:
        r, d = _renorm(moments, epsilon, correction)
        bias_t = bias_t + d * scale_t
        scale, scale_t = (value * r.astype(value.dtype) for value in (scale, scale_t))
    tangents = (t, scale_t, bias_t, epsilon_t)
    return (y, moments), linear(x, mask, moments, scale, epsilon, tangents)


def _tangents(
    spec: Spec,
    x: Array,
    mask: Array | None,
    moments: Centred,
    scale: Array,
    epsilon: Array,
    tangents: tuple[Array, Array, Array, Array],
) -> tuple[Array, Centred]:
    """Returns the tangents of `y` and the moments; one all-reduce, as its transpose."""
    dtype = compute_dtype(x.dtype)
    t, scale_t, bias_t, epsilon_t = tangents
    t = keep_valid(t.astype(dtype), mask)
    r = lax.rsqrt(moments.var + epsilon)
    # x̂, not x − μ: the latter's factor is r³, which leaves float32 beyond 1e12.
    z = keep_valid(x.astype(dtype) - moments.shift - moments.residual, mask)
    x_hat = z * r.astype(dtype)
    sums = [_sum(t, spec.reduction), _sum(_dot(x_hat, t), spec.reduction)]
    mean_t, along_t = _reduce(sums, dtype, spec.reduction)
    mean_t = _divide(mean_t, moments.count)
    along_t = _divide(along_t.real, moments.count)
    a = scale * r.astype(dtype)
    # Grouped per channel first: then the transpose sums two arrays and not four.
    offset = bias_t - a * mean_t
    slope = scale_t - a * (along_t + 0.5 * r * epsilon_t).astype(dtype)
    y_t = keep_valid((a * t + offset + x_hat * slope).astype(x.dtype), mask)
    # A variance that overflowed has no gradient.
    std = jnp.where(r > 0, 1 / jnp.where(r > 0, r, jnp.ones_like(r)), jnp.zeros_like(r))
    none = jnp.zeros_like
    return y_t, Centred(
        none(moments.shift), mean_t, 2 * std * along_t, none(moments.count)
    )
