"""Running values that move once for several calls, to the moments of all of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from bnjax.statistics import (
    BatchStats,
    CountedBatchStats,
    Moments,
    merge_moments,
    update_batch_stats,
)

POOL = "pool"  # the entry beside `mean` and `var`


class Pool(NamedTuple):
    """What a layer has seen since `start_pooling`."""

    start: Any  # the running values then
    moments: Moments  # of all calls since


def start_pooling(batch_stats: Any) -> Any:
    """Returns `batch_stats` whose next calls count as one, with a pool in each layer.

    For gradient accumulation: k microbatches between this and `finish_pooling` move
    the running values once, to the pooled moments of all (the outputs are still
    normalized by each microbatch alone). Pass them on from call to call, as always;
    they are right after each one. Also under `lax.scan`, `nn.scan` and `nn.vmap`.

    Args:
      batch_stats: The collection of a model with `bnjax.linen.BatchNorm` layers.

    >>> stats = start_pooling({"bn": {"mean": jnp.zeros(3), "var": jnp.ones(3)}})
    >>> sorted(stats["bn"])
    ['mean', 'pool', 'var']
    """
    if not isinstance(batch_stats, Mapping):
        return batch_stats
    inner = {name: start_pooling(value) for name, value in batch_stats.items()}
    if not _is_layer(batch_stats):
        return inner
    if POOL in batch_stats:
        raise ValueError("batch_stats are being pooled: call finish_pooling first.")
    kind = CountedBatchStats if "count" in batch_stats else BatchStats
    start = kind(*(batch_stats[name] for name in kind._fields))
    count = jnp.zeros_like(start.var)
    moments = Moments(jnp.zeros_like(start.mean), jnp.zeros_like(start.var), count)
    return {**inner, POOL: Pool(start, moments)}


def finish_pooling(batch_stats: Any) -> Any:
    """Returns `batch_stats` without the pools of `start_pooling`."""
    if not isinstance(batch_stats, Mapping):
        return batch_stats
    return {
        name: finish_pooling(value)
        for name, value in batch_stats.items()
        if not isinstance(value, Pool)
    }


def update_pool(pool: Pool, moments: Moments, **options: Any) -> tuple[Pool, Any]:
    """Returns the pool with one more call, and the running values after it."""
    # In the dtypes of the pool, which a scan carries.
    moments = Moments(
        *(new.astype(old.dtype) for old, new in zip(pool.moments, moments, strict=True))
    )
    moments = merge_moments(pool.moments, moments)
    return pool._replace(moments=moments), update_batch_stats(
        pool.start, moments, **options
    )


def _is_layer(batch_stats: Mapping[str, Any]) -> bool:
    return {"mean", "var"} <= set(batch_stats)
