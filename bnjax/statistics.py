"""Moments of a batch and running values (Algorithm 1, steps 1-2; Algorithm 2).

N examples, C features, m elements averaged per feature.
"""

from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact, Shaped

from bnjax.arguments import check_inexact, check_momentum
from bnjax.reduction import (
    Reduction,
    align_mask,
    all_reduce,
    feature_shape,
    keep_valid,
    make_reduction,
)
from bnjax.transform import (
    Centred,
    Scalar,
    Spec,
    abs_square,
    centre,
    compute_dtype,
)


class Moments(NamedTuple):
    """Moments of one batch, one value per feature."""

    mean: Inexact[Array, "*features"]  # μ
    var: Float[Array, "*features"]  # σ², biased: the divisor is count
    # m, over all devices; the name hides an idle method of tuple
    count: Float[Array, "*features"]  # type: ignore[assignment]


class BatchStats(NamedTuple):
    """Running values of training, one per feature; what inference normalizes with."""

    mean: Inexact[Array, "*features"]  # E[x]
    var: Float[Array, "*features"]  # Var[x]; unbiased unless asked otherwise


class CountedBatchStats(NamedTuple):
    """Running values that know how often they moved; for `momentum=None`."""

    mean: Inexact[Array, "*features"]  # E[x]
    var: Float[Array, "*features"]  # Var[x]; unbiased unless asked otherwise
    # calls; the name hides an idle method of tuple
    count: Float[Array, "*features"]  # type: ignore[assignment]


Stats = TypeVar("Stats", BatchStats, CountedBatchStats)


def init_batch_stats(features: int | tuple[int, ...]) -> BatchStats:
    """Returns the running values before the first batch: mean 0 and variance 1.

    Args:
      features: Static. The number of features, or the shape of the feature axes.

    >>> init_batch_stats(2)
    BatchStats(mean=Array([0., 0.], dtype=float32), var=Array([1., 1.], dtype=float32))
    """
    return BatchStats(jnp.zeros(features, jnp.float32), jnp.ones(features, jnp.float32))


def batch_moments(
    x: Inexact[Array, "..."],
    *,
    feature_axes: int | tuple[int, ...] = -1,
    axis_name: str | tuple[str, ...] | None = None,
    axis_index_groups: Any = None,
    mask: Shaped[Array, "..."] | None = None,
) -> Moments:
    """Returns the mini-batch mean and variance of Algorithm 1 (images: Section 3.2).

    By two passes over `x`, accurate for any mean: it has no running mean to lean on.

    Args:
      x: `(N, C)`, `(N, H, W, C)` or any other rank; real or complex floating dtype.
      feature_axes: Static. The axes that keep moments of their own.
      axis_name: Static. Mapped axis or axes to sum over, so that devices agree.
      axis_index_groups: Static. Groups of device indices that sum among themselves.
      mask: True (or non-zero) where an element counts. Of the rank of `x`, or of
        fewer axes: `(N,)` for examples, `(N, H, W)` for positions.

    Returns:
      Moments of shape `(C,)`; float64 if `x` is, otherwise float32. A feature with
      nothing to count has mean, var and count 0.

    Raises:
      TypeError: `x` is not of floating dtype.
      ValueError: `feature_axes` names an axis that `x` does not have, or `mask` does
        not fit `x`.
      NameError: `axis_name` is not bound.

    >>> batch_moments(jnp.array([[1.0, 5.0], [3.0, 5.0]])).var
    Array([1., 0.], dtype=float32)
    """
    check_inexact(x)
    reduction = make_reduction(x.ndim, feature_axes, axis_name, axis_index_groups)
    mask = align_mask(mask, x.shape)
    wide = keep_valid(x.astype(compute_dtype(x.dtype)), mask)
    shift = jnp.zeros((1,) * x.ndim, wide.dtype)
    moments = centre(wide, shift, mask, Spec(reduction, two_pass=True))
    return as_moments(moments, x.shape, reduction)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Returns the moments of two sets of elements taken together.

    Exact for any counts; a set without elements adds nothing, whatever its mean.

    >>> one = Moments(jnp.array([0.0]), jnp.array([0.0]), jnp.array([1.0]))
    >>> two = Moments(jnp.array([4.0]), jnp.array([0.0]), jnp.array([3.0]))
    >>> [float(value[0]) for value in merge_moments(one, two)]
    [3.0, 3.0, 4.0]
    """
    count = a.count + b.count
    share = b.count / jnp.maximum(count, jnp.ones_like(count))
    zero = jnp.zeros_like
    a_mean, a_var = (jnp.where(a.count > 0, v, zero(v)) for v in a[:2])
    b_mean, b_var = (jnp.where(b.count > 0, v, zero(v)) for v in b[:2])
    apart = jnp.where((a.count > 0) & (b.count > 0), b_mean - a_mean, zero(a_mean))
    step = share.astype(apart.dtype) * apart
    mean = jnp.where(a.count > 0, a_mean + step, b_mean)
    spread = share * (1 - share) * jnp.square(jnp.abs(apart))
    return Moments(mean, (1 - share) * a_var + share * b_var + spread, count)


def update_batch_stats(
    batch_stats: Stats,
    moments: Moments,
    *,
    momentum: Scalar | None = 0.99,
    unbiased: bool = True,
) -> Stats:
    """Returns the running values moved towards a batch; they carry no gradient.

    Args:
      batch_stats: The old values, `(C,)`.
      moments: Of one batch, `(C,)`.
      momentum: Weight of the old value, in [0, 1]. PyTorch's is one minus this. None:
        the plain average over the calls that moved the values, which takes
        `CountedBatchStats`.
      unbiased: Static. True: the batch adds m/(m−1) · var, the population's variance
        of Algorithm 2, step 10. False: var, as Flax does.

    Returns:
      Values of the type and dtype of `batch_stats`; the mean of complex input is
      complex. A feature with nothing to count keeps its values bit for bit; one with a
      single element keeps its variance, and all of `CountedBatchStats`.

    Raises:
      ValueError: `momentum` is a number outside [0, 1], or None without a count.
    """
    check_momentum(momentum)
    if momentum is None and not isinstance(batch_stats, CountedBatchStats):
        raise ValueError(
            "momentum=None averages over all calls, whose number must be known: give "
            "CountedBatchStats(mean, var, count=zeros), or a momentum in [0, 1]."
        )
    mean, var, count = moments
    if unbiased:
        var = var * (count / jnp.maximum(count - 1, jnp.ones_like(count)))

    def move(old: Array, new: Array, defined: Array) -> Array:
        if jnp.issubdtype(new.dtype, jnp.complexfloating):
            old = old.astype(new.dtype)
        keep, rate = _weights(batch_stats, momentum, old.real.dtype)
        moved = keep.astype(old.dtype) * old
        moved = moved + rate.astype(old.dtype) * new.astype(old.dtype)
        return lax.stop_gradient(jnp.where(defined, moved, old))

    several = count > 1
    var = move(batch_stats.var, var, several)
    if not isinstance(batch_stats, CountedBatchStats):
        return BatchStats(move(batch_stats.mean, mean, count > 0), var)
    mean = move(batch_stats.mean, mean, several)
    calls = batch_stats.count + several.astype(batch_stats.count.dtype)
    return CountedBatchStats(mean, var, calls)


def _weights(
    batch_stats: Stats, momentum: Scalar | None, dtype: Any
) -> tuple[Array, Array]:
    """Returns the weights of the old value and of the batch."""
    if momentum is None:
        assert isinstance(batch_stats, CountedBatchStats)
        calls = batch_stats.count.astype(dtype)
        return calls / (calls + 1), 1 / (calls + 1)
    keep = jnp.asarray(momentum, dtype)
    return keep, 1 - keep


def debias_batch_stats(
    batch_stats: CountedBatchStats, momentum: Scalar | None
) -> BatchStats:
    """Returns running values that started at 0, divided by 1 − momentumᵗ.

    So that after t calls they are a weighted average of the t batches alone; 0 and 1
    before the first. With a momentum of None they are one already.
    """
    mean, var, calls = batch_stats
    updated = calls > 0
    keep = jnp.asarray(0 if momentum is None else momentum, calls.dtype)
    # 1 − keepᵗ would cancel where keep is close to 1, and log(0) is −∞, times t > 0.
    weight = -jnp.expm1(jnp.where(updated, calls, 1) * jnp.log1p(keep - 1))
    # A momentum of 1 has seen nothing.
    updated &= weight > 0
    weight = jnp.where(updated, weight, jnp.ones_like(weight))

    def read(value: Array, start: int) -> Array:
        fair = value / weight.astype(value.dtype)
        return jnp.where(updated, fair, jnp.full_like(value, start))

    return BatchStats(read(mean, 0), read(var, 1))


def pool_moments(parts: Centred, reduction: Reduction) -> Moments:
    """Returns the moments of all parts together.

    Args:
      parts: `(K, *features)` each, moments of K sets of elements on this device.
      reduction: Its devices pool theirs too, by two all-reduces of `(C,)`.
    """
    total = all_reduce(parts.count.sum(0), reduction)
    share = parts.count / jnp.maximum(total, jnp.ones_like(total))[None]
    shift, residual, var = (
        jnp.where(parts.count > 0, value, jnp.zeros_like(value)) for value in parts[:3]
    )

    def average(values: Array) -> Array:
        return all_reduce((share.astype(values.dtype) * values).sum(0), reduction)

    # About a point near all of them, since their squares would cancel about 0.
    centre = average(shift)
    apart = jnp.where(
        parts.count > 0, (shift - centre[None]) + residual, jnp.zeros_like(shift)
    )
    step = average(apart)
    spread = average(var + abs_square(apart)) - abs_square(step)
    return Moments(centre + step, jnp.maximum(spread, jnp.zeros_like(spread)), total)


def as_moments(
    centred: Centred, shape: tuple[int, ...], reduction: Reduction
) -> Moments:
    """Returns the moments of an array of that shape, one value per feature."""
    shift, residual, var, count = squeeze(centred, shape, reduction)
    return Moments(shift + residual, var, count)


def squeeze(centred: Centred, shape: tuple[int, ...], reduction: Reduction) -> Centred:
    """Returns the parts of the moments, one value per feature."""
    features = feature_shape(shape, reduction)
    count = centred.count
    return Centred(
        *(
            jnp.broadcast_to(value.squeeze(reduction.axes), features)
            for value in (centred.shift, centred.residual, centred.var)
        ),
        count=jnp.broadcast_to(
            count.squeeze(reduction.axes) if count.ndim == len(shape) else count,
            features,
        ),
    )
