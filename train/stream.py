"""ImageNet from disk: grain reads, decodes and crops ahead of the training."""

import atexit
import collections
import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding

from train import crops
from train.sources import CorruptPictures, Records

Batch = dict[str, jax.Array]
HostBatches = Generator[dict[str, Any], None, None]

ENDLESS = 2**40  # steps; grain wants a length
PLACED_AHEAD = 2  # batches on their way to the devices while one is in use

_live = weakref.WeakSet()  # iterators that may still have threads or processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRows:
    """Reads the rows of a training batch that one process holds.

    What row `j` of step `s` is depends on the seed and on the stream position
    `position + s * batch_size + j` alone: not on who reads it, nor in which order.
    """

    source: Records  # its "image" still encoded
    batch_size: int  # global
    rows: range  # of the global batch
    image_size: int
    seed: int
    position: int
    order: Any  # indexed by position; see `epoch_orders`

    def __call__(self, step: int) -> dict[str, Any]:
        """Returns the rows of one step; see `_decode`."""
        first = self.position + step * self.batch_size
        positions = [first + row for row in self.rows]
        records = self.source.__getitems__([self.order[p] for p in positions])

        def crop(row, data):
            rng = np.random.default_rng((self.seed, positions[row]))
            return crops.random_resized_crop(data, rng, size=self.image_size)

        return _decode(records, crop, size=self.image_size, num_rows=len(self.rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalRows:
    """Reads the rows of an evaluation batch that one process holds, in order."""

    source: Records
    batch_size: int
    rows: range
    image_size: int

    def __call__(self, step: int) -> dict[str, Any]:
        """Returns the rows of one step; rows past the last example stay unset."""
        first = step * self.batch_size
        examples = [first + row for row in self.rows if first + row < len(self.source)]
        records = self.source.__getitems__(examples)

        def crop(row, data):
            return crops.central_crop(data, size=self.image_size)

        return _decode(records, crop, size=self.image_size, num_rows=len(self.rows))


def epoch_orders(num_examples: int, *, seed: int) -> grain.MapDataset:
    """Returns the endless order of examples: a new permutation for each epoch."""
    order = grain.MapDataset.range(num_examples).seed(seed)
    return order.shuffle().repeat()


def train_batches(
    source: Records,
    *,
    batch_size: int,
    seed: int,
    position: int,
    sharding: NamedSharding,
    image_size: int,
    num_workers: int,
    max_corrupt: int,
) -> Iterator[Batch]:
    """Returns the training stream; see `data.train_batches`."""
    read = TrainRows(
        source=source,
        batch_size=batch_size,
        rows=local_rows(sharding, batch_size),
        image_size=image_size,
        seed=seed,
        position=position,
        order=epoch_orders(len(source), seed=seed),
    )
    return _batches(
        read,
        num_steps=ENDLESS,
        num_workers=num_workers,
        sharding=sharding,
        max_corrupt=max_corrupt,
    )


def eval_batches(
    source: Records,
    *,
    batch_size: int,
    sharding: NamedSharding,
    image_size: int,
    num_workers: int,
) -> Iterator[Batch]:
    """Returns every example once; see `data.eval_batches`."""
    read = EvalRows(
        source=source,
        batch_size=batch_size,
        rows=local_rows(sharding, batch_size),
        image_size=image_size,
    )
    return _batches(
        read,
        num_steps=-(-len(source) // batch_size),
        num_workers=num_workers,
        sharding=sharding,
        max_corrupt=0,
    )


def local_rows(sharding: NamedSharding, batch_size: int) -> range:
    """Returns the rows of a global batch that lie on this process's devices."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = [range(batch_size)[index[0]] for index in indices if index]
    return range(min(r.start for r in rows), max(r.stop for r in rows))


def _batches(
    read: TrainRows | EvalRows,
    *,
    num_steps: int,
    num_workers: int,
    sharding: NamedSharding,
    max_corrupt: int,
) -> Iterator[Batch]:
    """Returns what `read` reads, checked and on the devices."""
    host = read_ahead(read, num_steps=num_steps, num_workers=num_workers)
    host = _allow_corrupt(host, limit=max_corrupt)
    batches = _place(host, sharding=sharding, size=read.batch_size)
    _live.add(batches)
    return batches


@atexit.register
def _close_live() -> None:
    # Left to the interpreter, grain would end after the modules it needs for that.
    for batches in list(_live):
        batches.close()


def read_ahead(
    read: Callable[[int], dict[str, Any]], *, num_steps: int, num_workers: int
) -> HostBatches:
    """Yields `read(0)`, `read(1)`, ... in order, computed ahead.

    Threads do the work, or, with `num_workers` > 0, that many processes, which import
    the main module anew: it needs its `if __name__ == "__main__"`. They end with the
    iterator.
    """
    if num_workers and not flags.FLAGS.is_parsed():
        # grain reads its own flags in the workers' name, and no one else parses them.
        flags.FLAGS.mark_as_parsed()
    # Decoding leaves the interpreter lock, so threads alone fill a few cores. A buffer
    # element is a batch.
    threads = 2 if num_workers else min(16, os.cpu_count() or 1)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    workers = grain.MultiprocessingOptions(num_workers=num_workers)
    steps = grain.MapDataset.range(num_steps).map(read).to_iter_dataset(options)
    with contextlib.closing(iter(steps.mp_prefetch(workers))) as iterator:
        yield from iterator


def _allow_corrupt(batches: HostBatches, *, limit: int) -> HostBatches:
    """Yields the batches; logs and counts the unreadable pictures in them."""
    corrupt = CorruptPictures(limit)
    with contextlib.closing(batches):
        for batch in batches:
            for name, error in batch.pop("corrupt"):
                corrupt.add(name, error)
            yield batch


def _place(
    batches: HostBatches, *, sharding: NamedSharding, size: int
) -> Iterator[Batch]:
    """Yields global arrays of `size` rows; the next ones are already on their way."""

    def put(rows):
        shape = (size, *rows.shape[1:])
        return jax.make_array_from_process_local_data(sharding, rows, shape)

    placed = collections.deque()
    with contextlib.closing(batches):
        for batch in batches:
            placed.append(jax.tree.map(put, batch))
            if len(placed) > PLACED_AHEAD:
                yield placed.popleft()
        yield from placed


def _decode(
    records: Sequence[dict],
    crop: Callable[[int, bytes], np.ndarray],
    *,
    size: int,
    num_rows: int,
) -> dict[str, Any]:
    """Returns image, label, mask and "corrupt", name and error of what is unreadable.

    The rows of those pictures, and rows without a record, are zero and masked.
    """
    batch = {
        "image": np.zeros((num_rows, size, size, 3), np.uint8),
        "label": np.zeros(num_rows, np.int32),
        "mask": np.zeros(num_rows, bool),
        "corrupt": [],
    }
    for row, record in enumerate(records):
        batch["label"][row] = record["label"]
        try:
            batch["image"][row] = crop(row, record["image"])
            batch["mask"][row] = True
        except Exception as error:  # Pillow's parsers raise whatever they trip over.
            name = record["file_name"].decode()
            batch["corrupt"].append((name, type(error).__name__))
    return batch
