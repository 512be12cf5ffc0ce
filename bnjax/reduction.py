"""Which elements are averaged: axes, masks, and sums over devices."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num, Shaped


class Reduction(NamedTuple):
    """What one statistic is averaged over; static and hashable."""

    axes: tuple[int, ...]  # of the array, those that keep no statistic of their own
    axis_name: str | tuple[str, ...] | None = None  # mapped axes, the devices
    axis_index_groups: tuple[tuple[int, ...], ...] | None = None


def make_reduction(
    ndim: int,
    feature_axes: int | tuple[int, ...],
    axis_name: str | tuple[str, ...] | None = None,
    axis_index_groups: Any = None,
) -> Reduction:
    """Returns the reduction over every axis but `feature_axes`, checked."""
    kept = canonical_axes(ndim, feature_axes)
    axes = tuple(axis for axis in range(ndim) if axis not in kept)
    if axis_index_groups is None:
        groups = None
    else:
        groups = tuple(tuple(int(i) for i in group) for group in axis_index_groups)
        if len({len(group) for group in groups}) != 1:
            # JAX takes the size of the first one for that of all.
            raise ValueError(
                f"axis_index_groups={groups} must be groups of one size. For uneven "
                "ones split the batch otherwise, or mask a part of it."
            )
    return Reduction(axes, axis_name, groups)


def canonical_axes(ndim: int, feature_axes: int | tuple[int, ...]) -> tuple[int, ...]:
    """Returns `feature_axes` as sorted, distinct, non-negative numbers."""
    named = (feature_axes,) if isinstance(feature_axes, int) else tuple(feature_axes)
    wrong = [axis for axis in named if not -ndim <= axis < ndim]
    if wrong:
        raise ValueError(
            f"feature_axes={feature_axes} names axes {wrong}, but x has rank {ndim}. "
            f"Each axis must lie in [{-ndim}, {ndim - 1}]; channels-last data uses -1."
        )
    axes = sorted({axis % ndim for axis in named})
    if len(axes) < len(named):
        raise ValueError(
            f"feature_axes={feature_axes} names an axis of x twice (rank {ndim}). "
            "Name each axis once."
        )
    return tuple(axes)


def feature_shape(shape: tuple[int, ...], reduction: Reduction) -> tuple[int, ...]:
    """Returns the shape of a statistic of an array of that shape."""
    return tuple(n for axis, n in enumerate(shape) if axis not in reduction.axes)


def align_mask(
    mask: Shaped[Array, "..."] | None, shape: tuple[int, ...]
) -> Shaped[Array, "..."] | None:
    """Returns `mask` as bool of the rank of `shape`: True where an element counts."""
    if mask is None:
        return None
    aligned = mask
    if mask.ndim < len(shape):
        aligned = lax.expand_dims(mask, range(mask.ndim, len(shape)))
    fits = aligned.ndim == len(shape) and all(
        n in (1, size) for n, size in zip(aligned.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask has shape {mask.shape}, but x has shape {shape}. A mask of the rank "
            "of x broadcasts to it; one of fewer axes matches its leading axes: "
            f"{shape[:1]} for examples, {shape[:-1]} for positions."
        )
    return aligned if aligned.dtype == jnp.bool_ else aligned != 0


def keep_valid(
    x: Num[Array, "..."], mask: Shaped[Array, "..."] | None
) -> Num[Array, "..."]:
    """Returns `x` with zeros where nothing counts."""
    # Before any arithmetic: a NaN behind the mask would reach gradients as 0 · NaN.
    return x if mask is None else jnp.where(mask, x, jnp.zeros((), x.dtype))


def local_count(
    shape: tuple[int, ...], mask: Shaped[Array, "..."] | None, reduction: Reduction
) -> int | Array:
    """Returns the elements per feature on this device: int without a mask."""
    if mask is None:
        return math.prod(shape[axis] for axis in reduction.axes)
    # Over the mask's own elements: a broadcast one would be read as if it were as large
    # as x. A float32 sum of ones stops at 2²⁴, so integers first; floats over the first
    # axis, the one that sharded arrays split, to travel with the other sums.
    outer, inner = reduction.axes[:1], reduction.axes[1:]
    count = mask.sum(inner, keepdims=True, dtype=jnp.int32).astype(jnp.float32)
    count = count.sum(outer, keepdims=True).squeeze(reduction.axes)
    repeats = [shape[axis] // max(mask.shape[axis], 1) for axis in reduction.axes]
    features = feature_shape(shape, reduction)
    count = count * math.prod(repeats)
    return jnp.broadcast_to(count, features) if count.shape != features else count


def static_global_count(
    shape: tuple[int, ...], mask: Shaped[Array, "..."] | None, reduction: Reduction
) -> int | None:
    """Returns the elements per feature over all devices, if known while tracing."""
    if mask is not None:
        return None
    local = local_count(shape, mask, reduction)
    return None if not isinstance(local, int) else local * axis_size(reduction)


def axis_size(reduction: Reduction) -> int:
    """Returns over how many devices (or vmapped rows) the reduction sums."""
    return 1 if reduction.axis_name is None else all_reduce(1, reduction)


def all_reduce(x: Any, reduction: Reduction) -> Any:
    """Returns `x` summed over the mapped axes; `x` itself when there are none."""
    name, groups = reduction.axis_name, reduction.axis_index_groups
    if name is None:
        return x
    try:
        return lax.psum(x, name, axis_index_groups=groups)
    except NameError as error:
        raise NameError(
            f"axis_name={name!r} is not bound here; bound axes: {_bound_axes()}. Bind "
            "it with jax.shard_map, jax.pmap or jax.vmap(axis_name=...). Under plain "
            "jit over sharded arrays the batch is global already: use axis_name=None."
        ) from error
    except NotImplementedError as error:
        if groups is None:
            raise
        raise NotImplementedError(
            f"axis_index_groups={groups} works under pmap and under shard_map with "
            "check_vma=False only. Elsewhere split the devices over two mesh axes, "
            'such as jax.make_mesh((2, 4), ("outer", "inner")), and pass '
            'axis_name="inner".'
        ) from error


def _bound_axes() -> str:
    """Returns the names of the mapped axes in scope, for a message."""
    try:  # JAX has no public name for this.
        names = jax._src.core.get_axis_env().axis_names()  # type: ignore[attr-defined]
        return ", ".join(map(repr, names)) or "none"
    except AttributeError:
        return "unknown"
