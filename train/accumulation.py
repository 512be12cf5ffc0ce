"""One step's gradient from several microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import bnjax


def add_microbatches(
    gradient_of: Callable[..., Any],
    state: Any,
    batch: dict[str, Array],
    key: Array,
    number: int,
) -> tuple[Any, tuple[Any, dict[str, Array]]]:
    """Returns what `gradient_of` does, of microbatches one after the other.

    `gradient_of(batch_stats, rows, key)` has the parameters of `state` bound. Every
    `number`th row is of one microbatch, so that they are the same for any number
    of devices. The running values move once, to the moments of all of them together.
    """

    def add(carry: tuple[Any, Any], part: Array) -> tuple[tuple[Any, Any], Any]:
        gradients, batch_stats = carry
        rows = jax.tree.map(
            lambda a: a.reshape(-1, number, *a.shape[1:])[:, part], batch
        )
        found = gradient_of(batch_stats, rows, jax.random.fold_in(key, part))
        new, (batch_stats, sums) = found
        return (jax.tree.map(jnp.add, gradients, new), batch_stats), sums

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    start = (zeros, bnjax.start_pooling(state.batch_stats))
    # XLA:CPU runs convolutions inside of a loop on a single thread.
    unroll = number if jax.default_backend() == "cpu" else 1
    (gradients, batch_stats), sums = lax.scan(
        add, start, jnp.arange(number), unroll=unroll
    )
    sums = jax.tree.map(lambda a: a.sum(0, dtype=a.dtype), sums)
    return gradients, (bnjax.finish_pooling(batch_stats), sums)
