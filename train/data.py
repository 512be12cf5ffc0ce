"""From TFDS data sets to batches of global arrays, sharded over the devices.

Training is an endless stream of examples: the data set, again and again, each time in
a new order. A batch is the next `batch_size` of them, and an epoch may end inside one.
The stream is a function of the seed, and a place in it is a count of examples. So a run
resumes by its position, and sees the same batches on any number of devices.
"""

import functools
import os
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from train import stream
from train.sources import DATASETS as DATASETS
from train.sources import DataError as DataError
from train.sources import Dataset as Dataset
from train.sources import check_data as check_data
from train.sources import get_dataset, open_split
from train.sources import load_arrays as load_arrays
from train.stream import Batch


class Resident(NamedTuple):
    """A whole split in the memory of every device."""

    images: jax.Array  # (n, H, W, C) uint8
    labels: jax.Array  # (n,) int32


@functools.lru_cache(maxsize=4)
def load_resident(
    name: str,
    *,
    split: str,
    sharding: NamedSharding,
    data_dir: str | os.PathLike | None = None,
    max_corrupt: int = 0,
) -> Resident:
    """Returns a split on all devices of the sharding's mesh; decoded the first time."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    arrays = load_arrays(name, split=split, data_dir=data_dir, max_corrupt=max_corrupt)
    return Resident(
        *(
            jax.make_array_from_process_local_data(everywhere, array, array.shape)
            for array in arrays
        )
    )


def epoch_order(
    key: jax.Array, position: jax.Array | int, count: int, num_examples: int
) -> jax.Array:
    """Returns which examples stand at positions `position`, ... of the stream.

    Epoch `e` is the permutation drawn from `fold_in(key, e)`, so the stream may be
    entered anywhere, and its parts fit together.

    >>> order = epoch_order(jax.random.key(0), 5, 10, 5)  # the second and third epoch
    >>> sorted(order[:5].tolist()), sorted(order[5:].tolist())
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])

    Args:
      key: A typed PRNG key.
      position: int32 scalar, at least 0; may be traced.
      count: Static. How many positions.
      num_examples: Static. Length of an epoch.

    Returns:
      int32 of shape `(count,)`, in `[0, num_examples)`.
    """

    def permutation(epoch):
        bits = jax.random.bits(jax.random.fold_in(key, epoch), (num_examples,))
        # random.permutation sorts twice, lest equal bits keep their order; among 60 000
        # examples that is one pair in two epochs.
        return jnp.argsort(bits).astype(jnp.int32)

    epoch, start = divmod(jnp.asarray(position, jnp.int32), num_examples)
    num_epochs = (num_examples - 1 + count + num_examples - 1) // num_examples
    epochs = epoch + jnp.arange(num_epochs, dtype=jnp.int32)
    order = lax.map(permutation, epochs).reshape(-1)
    return lax.dynamic_slice(order, (start,), (count,))


def train_batches(
    name: str,
    *,
    batch_size: int,
    seed: int,
    sharding: NamedSharding,
    position: int = 0,
    split: str | None = None,
    data_dir: str | os.PathLike | None = None,
    image_size: int = 224,
    num_workers: int = 0,
    max_corrupt: int = 100,
) -> Iterator[Batch]:
    """Returns the endless stream of training batches, from a position on.

    A small data set lies on the devices and a step gathers its rows there. ImageNet is
    read from disk: each process decodes the rows that its devices hold, each picture
    with its own random crop (8-100 % of the area, aspect 3/4-4/3).

    Args:
      name: One of `DATASETS`.
      batch_size: Global; a multiple of the number of devices.
      seed: Of the order and the crops; in [0, 2³¹).
      sharding: `PartitionSpec` of one axis over a mesh of one axis.
      position: Number of examples drawn before, steps so far times `batch_size`; in
        [0, 2³¹).
      split: None: the data set's training split.
      data_dir: See `open_split`.
      image_size: Side of an ImageNet crop, in pixels.
      num_workers: Processes that decode ImageNet; 0: threads of this one. The batches
        are the same.
      max_corrupt: How many unreadable pictures a process may come across. Each is
        logged once; it is left out of a small data set, and zeroed and masked in a
        batch of ImageNet.

    Returns:
      An iterator of `image` (B, H, W, C) uint8 and `label` (B,) int32, and for ImageNet
      `mask` (B,) bool, all sharded over the first axis. Row `j` of batch `s` is the
      example at stream position `position + s * B + j`.

    Raises:
      DataError: See `open_split`; while iterating: more than `max_corrupt` pictures.
      ValueError: `batch_size` or `position` is impossible.
    """
    dataset = get_dataset(name)
    split = split or dataset.train_split
    if batch_size < 1 or batch_size % sharding.num_devices:
        raise ValueError(
            f"batch_size={batch_size} is not a positive multiple of the "
            f"{sharding.num_devices} devices that share a batch."
        )
    if position < 0:
        raise ValueError(f"position={position} must be at least 0.")
    options = {"batch_size": batch_size, "seed": seed, "position": position}
    if dataset.streams:
        return stream.train_batches(
            open_split(name, split=split, data_dir=data_dir),
            **options,
            sharding=sharding,
            image_size=image_size,
            num_workers=num_workers,
            max_corrupt=max_corrupt,
        )
    resident = load_resident(
        name,
        split=split,
        sharding=sharding,
        data_dir=data_dir,
        max_corrupt=max_corrupt,
    )
    return _resident_train_batches(resident, **options, sharding=sharding)


def eval_batches(
    name: str,
    *,
    batch_size: int,
    sharding: NamedSharding,
    split: str | None = None,
    data_dir: str | os.PathLike | None = None,
    image_size: int = 224,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Returns batches that hold every example of a split once, in order.

    Args:
      name: One of `DATASETS`.
      batch_size: Global; rounded up to a multiple of the number of devices.
      sharding: See `train_batches`.
      split: None: the data set's evaluation split.
      data_dir: See `open_split`.
      image_size: Side of the central crop of an ImageNet picture, whose shorter side
        has been resized to `image_size * 256 / 224`.
      num_workers: See `train_batches`.

    Returns:
      A finite iterator of `image` (B, H, W, C) uint8, `label` (B,) int32 and `mask`
      (B,) bool, sharded over the first axis. What the last batch lacks is zero, with
      mask False.

    Raises:
      DataError: See `open_split`; while iterating: a picture cannot be read.
    """
    dataset = get_dataset(name)
    split = split or dataset.eval_split
    batch_size = -(-batch_size // sharding.num_devices) * sharding.num_devices
    if dataset.streams:
        return stream.eval_batches(
            open_split(name, split=split, data_dir=data_dir),
            batch_size=batch_size,
            sharding=sharding,
            image_size=image_size,
            num_workers=num_workers,
        )
    resident = load_resident(name, split=split, sharding=sharding, data_dir=data_dir)
    return _resident_eval_batches(resident, batch_size=batch_size, sharding=sharding)


def _resident_train_batches(
    resident: Resident,
    *,
    batch_size: int,
    seed: int,
    position: int,
    sharding: NamedSharding,
) -> Iterator[Batch]:
    """Yields the stream of a data set that lies on the devices."""
    num_examples = len(resident.labels)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    get_order = jax.jit(epoch_order, static_argnums=(2, 3), out_shardings=everywhere)
    gather = jax.jit(_gather, static_argnames="batch_size", out_shardings=sharding)
    key = jax.random.key(seed)
    # The order of about an epoch at a time: a permutation is dear, a slice of it cheap.
    num_steps = max(1, num_examples // batch_size)
    while True:
        count = num_steps * batch_size
        order = get_order(key, np.int32(position), count, num_examples)
        for first in range(0, count, batch_size):
            yield gather(resident, order, np.int32(first), batch_size=batch_size)
        position += count


def _gather(
    resident: Resident, order: jax.Array, first: jax.Array, *, batch_size: int
) -> Batch:
    rows = lax.dynamic_slice(order, (first,), (batch_size,))
    return {
        "image": jnp.take(resident.images, rows, axis=0),
        "label": jnp.take(resident.labels, rows, axis=0),
    }


def _resident_eval_batches(
    resident: Resident, *, batch_size: int, sharding: NamedSharding
) -> Iterator[Batch]:
    """Yields each example of a data set that lies on the devices."""
    pad = jax.jit(_pad, static_argnames="batch_size", out_shardings=sharding)
    for first in range(0, len(resident.labels), batch_size):
        yield pad(resident, np.int32(first), batch_size=batch_size)


def _pad(resident: Resident, first: jax.Array, *, batch_size: int) -> Batch:
    rows = first + jnp.arange(batch_size, dtype=jnp.int32)
    mask = rows < len(resident.labels)
    # Rows past the end are out of bounds, which reads as the fill value.
    options = {"axis": 0, "mode": "fill", "fill_value": 0}
    return {
        "image": jnp.take(resident.images, rows, **options),
        "label": jnp.take(resident.labels, rows, **options),
        "mask": mask,
    }
