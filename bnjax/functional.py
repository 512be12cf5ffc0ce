"""Batch Normalization as pure functions (Ioffe & Szegedy 2015, Algorithms 1 and 2).

N examples, C features, m elements averaged per feature.
"""

import functools
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact, Shaped

from bnjax.arguments import (
    affine_parameter,
    check_batch_stats,
    check_inexact,
    check_momentum,
    check_var,
    check_varying,
    check_virtual_batch_size,
    make_correction,
    per_feature,
)
from bnjax.reduction import (
    Reduction,
    align_mask,
    keep_valid,
    make_reduction,
    static_global_count,
)
from bnjax.statistics import (
    BatchStats,
    CountedBatchStats,
    Moments,
    Stats,
    as_moments,
    pool_moments,
    squeeze,
    update_batch_stats,
)
from bnjax.transform import (
    Centred,
    Renorm,
    Scalar,
    Spec,
    affine,
    batch_transform,
    compute_dtype,
)
from bnjax.virtual import Batch, split_batch


def normalize(
    x: Inexact[Array, "..."],
    mean: Inexact[Array, "*features"],
    var: Float[Array, "*features"],
    *,
    scale: Inexact[Array, "..."] | None = None,
    bias: Inexact[Array, "..."] | None = None,
    epsilon: Scalar = 1e-5,
    feature_axes: int | tuple[int, ...] = -1,
    mask: Shaped[Array, "..."] | None = None,
) -> Inexact[Array, "..."]:
    """Returns γ · (x − mean) / √(var + ε) + β, with the given statistics.

    The subtraction comes first: x · a + b would cancel where the mean is large.

    Args:
      x: `(N, ..., C)`; real or complex floating dtype.
      mean: `(C,)`.
      var: `(C,)`, not negative.
      scale: γ, `(C,)`; or of the rank of `x` and broadcasting to it. None: 1.
      bias: β, likewise. None: 0.
      epsilon: ε, added to `var` under the root.
      feature_axes: Static. The axes of `x` that `mean` and `var` belong to.
      mask: True where an element counts, as in `batch_moments`; elsewhere y is 0.

    Returns:
      Shape and dtype of `x`; computed in float32 or wider.
    """
    check_inexact(x)
    check_var(var)
    reduction = make_reduction(x.ndim, feature_axes)
    mask = align_mask(mask, x.shape)
    dtype = compute_dtype(x.dtype)
    wide = keep_valid(x.astype(dtype), mask)
    zero = jnp.zeros((), dtype)
    mean = per_feature(mean, x, reduction, "mean").astype(dtype)
    var = per_feature(var, x, reduction, "var").astype(zero.real.dtype)
    multiplier = lax.rsqrt(var + jnp.asarray(epsilon, var.dtype)).astype(dtype)
    multiplier = multiplier * affine_parameter(scale, 1, x, reduction, "scale", mask)
    offset = affine_parameter(bias, 0, x, reduction, "bias", mask)
    y = affine(wide, Centred(mean, zero, var, zero), multiplier, offset)
    return keep_valid(y.astype(x.dtype), mask)


def batch_norm(
    x: Inexact[Array, "..."],
    batch_stats: Stats,
    *,
    scale: Inexact[Array, "..."] | None = None,
    bias: Inexact[Array, "..."] | None = None,
    use_running_average: bool = False,
    update_stats: bool = True,
    momentum: Scalar | None = 0.99,
    epsilon: Scalar = 1e-5,
    feature_axes: int | tuple[int, ...] = -1,
    axis_name: str | tuple[str, ...] | None = None,
    axis_index_groups: Any = None,
    mask: Shaped[Array, "..."] | None = None,
    unbiased: bool = True,
    virtual_batch_size: int | None = None,
    renorm: Renorm | None = None,
) -> tuple[Inexact[Array, "..."], Stats]:
    """Returns the batch-normalized `x` and the new running values (Algorithms 1, 2).

    In training the batch normalizes itself, with the gradient through its mean and
    variance (Section 3), and the running values move. With `use_running_average` the
    running values normalize and stay as they are, without any collective.

    Args:
      x: `(N, C)`, `(N, H, W, C)` or any other rank; real or complex floating dtype.
      batch_stats: Running values, `(C,)`, float32 or wider, the same on all devices.
      scale: γ, `(C,)`; `(N, C)` for each example; or of the rank of `x` and
        broadcasting to it. None: 1.
      bias: β, likewise. None: 0.
      use_running_average: Static. Normalize with `batch_stats`, not with the batch.
      update_stats: Static. False: return `batch_stats` as they are.
      momentum: Weight of the old running value, in [0, 1]. None: the average over all
        calls; `batch_stats` are `CountedBatchStats` then.
      epsilon: ε, added to the variance under the root.
      feature_axes: Static. The axes that keep statistics of their own.
      axis_name: Static. Mapped axis or axes to sum over, so that devices agree. None
        under plain jit, where the batch is global already.
      axis_index_groups: Static. Groups of device indices that sum among themselves.
      mask: True (or non-zero) where an element counts, as in `batch_moments`.
        Nothing else influences a value, a statistic or a gradient; y is 0 there.
      unbiased: Static. See `update_batch_stats`.
      virtual_batch_size: Static. Examples, in training, that normalize each other:
        consecutive ones of this device; what is left over joins the last group. The
        running values move once, to the moments of all groups and devices together.
      renorm: Batch Renormalization (Ioffe 2017), in training: γ · (x̂ · r + d) + β.

    Returns:
      `y` with shape and dtype of `x`, and the new running values. Where nothing counts
      the running values stay and y is 0. Values further than 1e19 from their mean
      overflow float32 when squared: then y is β and the running variance infinite.

    Raises:
      TypeError: `x` is not of floating dtype, or `batch_stats` are in half precision.
      ValueError: An argument does not fit `x`, a feature has one single element,
        which its own batch cannot normalize, or a running variance is negative or NaN
        in evaluation (outside of jit).
      NameError: `axis_name` is not bound.

    >>> x = jnp.array([[1.0], [3.0]])
    >>> y, new = batch_norm(x, init_batch_stats(1), epsilon=0.0, momentum=0.75)
    >>> y.tolist(), new.mean.tolist(), new.var.tolist()
    ([[-1.0], [1.0]], [0.5], [1.25])
    """
    check_batch_stats(batch_stats)
    check_momentum(momentum)
    options: dict[str, Any] = {
        "scale": scale,
        "bias": bias,
        "epsilon": epsilon,
        "feature_axes": feature_axes,
        "mask": mask,
    }
    if use_running_average:
        return normalize(x, batch_stats.mean, batch_stats.var, **options), batch_stats
    y, moments = normalize_batch(
        x,
        batch_stats,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        virtual_batch_size=virtual_batch_size,
        renorm=renorm,
        **options,
    )
    if update_stats:
        batch_stats = update_batch_stats(
            batch_stats, moments, momentum=momentum, unbiased=unbiased
        )
    return y, batch_stats


def normalize_batch(
    x: Inexact[Array, "..."],
    batch_stats: BatchStats | CountedBatchStats,
    *,
    scale: Inexact[Array, "..."] | None = None,
    bias: Inexact[Array, "..."] | None = None,
    epsilon: Scalar = 1e-5,
    feature_axes: int | tuple[int, ...] = -1,
    axis_name: str | tuple[str, ...] | None = None,
    axis_index_groups: Any = None,
    mask: Shaped[Array, "..."] | None = None,
    virtual_batch_size: int | None = None,
    renorm: Renorm | None = None,
    two_pass: bool = False,
    single: Literal["error", "warning", "fine"] = "error",
) -> tuple[Inexact[Array, "..."], Moments]:
    """Returns `x` normalized by its own batch, and the batch's moments; for modules.

    Args:
      x: As in `batch_norm`, and so are the other arguments.
      batch_stats: The mean is a guess of the batch's, the same on all devices; without
        `renorm` it changes no result beyond rounding.
      two_pass: Static. Find the mean first, with a second all-reduce.
      single: Static. What one element per feature is, which is normalized to β.
    """
    check_inexact(x)
    reduction = make_reduction(x.ndim, feature_axes, axis_name, axis_index_groups)
    mask = align_mask(mask, x.shape)
    check_varying(batch_stats.mean, axis_name)
    check_virtual_batch_size(virtual_batch_size, x.shape, reduction)
    mean = per_feature(batch_stats.mean, x, reduction, "batch_stats.mean")
    var = per_feature(batch_stats.var, x, reduction, "batch_stats.var")
    batch = Batch(
        x,
        affine_parameter(scale, 1, x, reduction, "scale", mask),
        affine_parameter(bias, 0, x, reduction, "bias", mask),
        mean.astype(compute_dtype(x.dtype)),
        mask,
        make_correction(renorm, x, mean, var),
    )
    transform = functools.partial(
        _transform_batch, epsilon=epsilon, two_pass=two_pass, single=single
    )
    if virtual_batch_size is None:
        y, moments = transform(batch, reduction)
        return y, as_moments(moments, x.shape, reduction)
    ys, parts = [], []
    for group, alone in split_batch(batch, reduction, virtual_batch_size):
        y, moments = transform(group, alone)
        ys.append(lax.collapse(y, 0, 2))
        parts.append(squeeze(moments, group.x.shape, alone))
    moments = jax.tree.map(lambda *each: jnp.concatenate(each), *parts)
    return jnp.concatenate(ys), pool_moments(moments, reduction)


def _transform_batch(
    batch: Batch,
    reduction: Reduction,
    *,
    epsilon: Scalar,
    two_pass: bool,
    single: str,
) -> tuple[Array, Centred]:
    """Returns `y` and moments of arrays that line up."""
    x, scale, bias, shift, mask, correction = batch
    if static_global_count(x.shape, mask, reduction) == 1 and single != "fine":
        message = (
            f"x of shape {x.shape} has one element per feature over all devices "
            f"(reduced axes: {reduction.axes}): its own batch normalizes it to 0. "
            "Train on more examples, or pass use_running_average=True."
        )
        if single == "error":
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    epsilon = jnp.asarray(epsilon, shift.real.dtype)
    spec = Spec(reduction, two_pass)
    # Devices are within some map, and JAX's errors about them belong to this call.
    transform = _compiled if reduction.axis_name is None else batch_transform
    return transform(spec, x, scale, bias, epsilon, shift, mask, correction)


# Outside of jit the conditional inside would be compiled anew in every call.
_compiled = jax.jit(batch_transform, static_argnums=0, inline=True)


def inference_affine(
    batch_stats: BatchStats,
    *,
    scale: Inexact[Array, "*features"] | None = None,
    bias: Inexact[Array, "*features"] | None = None,
    epsilon: Scalar = 1e-5,
) -> tuple[Inexact[Array, "*features"], Inexact[Array, "*features"]]:
    """Returns the `(multiplier, offset)` of inference (Algorithm 2, step 11).

    y = multiplier · x + offset, `(C,)` each, is what folds into the layer before. On
    its own it cancels where the mean is large; `normalize` does not.
    """
    mean, var = batch_stats
    multiplier = lax.rsqrt(var + jnp.asarray(epsilon, var.dtype)).astype(mean.dtype)
    if scale is not None:
        multiplier = multiplier * scale.astype(mean.dtype)
    offset = -mean * multiplier
    return multiplier, offset if bias is None else offset + bias.astype(mean.dtype)
