"""Virtual batches (Hoffer et al. 2017): groups that normalize among themselves."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Bool, Inexact

from bnjax.reduction import Reduction
from bnjax.transform import Correction


class Batch(NamedTuple):
    """What one transform works on; all of the rank of `x`, broadcasting to it."""

    x: Inexact[Array, "..."]
    scale: Inexact[Array, "..."]
    bias: Inexact[Array, "..."]
    shift: Inexact[Array, "..."]
    mask: Bool[Array, "..."] | None
    correction: Correction | None


def split_batch(
    batch: Batch, reduction: Reduction, size: int
) -> Iterator[tuple[Batch, Reduction]]:
    """Yields groups of `size` examples, stacked along a new first axis.

    All at once if they come out even; otherwise without the last one, and then that
    one, with what is left over. Devices do not share within a group.
    """
    count = len(batch.x)
    groups = max(count // size, 1)
    alone = Reduction(tuple(axis + 1 for axis in reduction.axes))
    even = groups if count == groups * size else groups - 1
    for start, stop, number in ((0, even * size, even), (even * size, count, 1)):
        if number and (stop > start or not count):
            yield _stack(batch, start, stop, number), alone


def _stack(batch: Batch, start: int, stop: int, number: int) -> Batch:
    """Returns `number` groups of the rows from `start` to `stop`."""
    size = (stop - start) // number

    def stack(value: Array) -> Array:
        if value.ndim < batch.x.ndim:  # the limits of a correction
            return value
        if len(value) == 1 and len(batch.x) != 1:  # of all rows
            return lax.expand_dims(value, (0,))
        return value[start:stop].reshape(number, size, *value.shape[1:])

    return jax.tree.map(stack, batch)
