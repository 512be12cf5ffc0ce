"""Which data sets there are, and their records as TFDS prepared them."""

import dataclasses
import io
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import absl.logging
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.core.data_sources.base import BaseDataSource


class DataError(Exception):
    """The data are missing or broken; the message says which, and what to do."""


class Dataset(NamedTuple):
    """What a run needs to know of a data set before it reads it."""

    name: str  # TFDS's
    train_split: str
    eval_split: str
    num_classes: int
    image_shape: tuple[int, int, int] | None  # None: sizes differ
    streams: bool  # read from disk as it goes; otherwise held on the devices


DATASETS = {
    "mnist_subset": Dataset("mnist_subset", "train", "test", 10, (28, 28, 1), False),
    "mnist": Dataset("mnist", "train", "test", 10, (28, 28, 1), False),
    "cifar10": Dataset("cifar10", "train", "test", 10, (32, 32, 3), False),
    "imagenet2012": Dataset("imagenet2012", "train", "validation", 1000, None, True),
}
EMBEDDED = pathlib.Path(__file__).parent / "datasets" / "mnist_subset" / "1.0.0"
HARMLESS_LOGS = (
    "created with group size",  # the embedded sample is, and it reads as fast
    "OpenCV is not installed",  # Pillow decodes
    "has no dataset_info.json",  # DataError says it better
    "read_only=True, setting",  # Orbax, of what evaluation asks for
    "Given directory is read only",
)
logger = logging.getLogger(__name__)


class CorruptPictures:
    """Those that a reader came across, each counted once, up to a limit."""

    def __init__(self, limit: int) -> None:
        """Allows `limit` of them."""
        self._limit = limit
        self._names: set[str] = set()

    def add(self, name: str, error: str) -> None:
        """Logs one that is new, or raises a DataError that names it."""
        if name in self._names:
            return
        self._names.add(name)
        count = len(self._names)
        if count > self._limit:
            raise DataError(
                f"{name} is unreadable ({error}), and {self._limit} such pictures are "
                "allowed: --max-corrupt in training, none in evaluation."
            )
        logger.warning(
            "Left out %s, which is unreadable: %s (%d of at most %d)",
            name,
            error,
            count,
            self._limit,
        )


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a split; "image" is the bytes of a picture file."""

    source: BaseDataSource
    name: str  # for messages

    def __len__(self) -> int:
        """Returns the number of records."""
        return len(self.source)

    def __getitems__(self, numbers: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Returns some records; one read of many costs a fraction of single ones."""
        try:
            return self.source.__getitems__(numbers)
        except Exception as error:  # of whatever kind a broken file brings about
            raise DataError(f"Cannot read {self.name}: {error}.") from error


def _worth_logging(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in HARMLESS_LOGS)


absl.logging.get_absl_logger().addFilter(_worth_logging)


def get_dataset(name: str) -> Dataset:
    """Returns the data set of that name, or raises a DataError that lists them."""
    if name not in DATASETS:
        raise DataError(f"No data set {name!r}. There are: {', '.join(DATASETS)}.")
    return DATASETS[name]


def open_split(
    name: str, *, split: str, data_dir: str | os.PathLike | None = None
) -> Records:
    """Returns the records of a split.

    Args:
      name: One of `DATASETS`.
      split: In TFDS's notation, for instance `"train"` or `"train[:1000]"`.
      data_dir: The folder that TFDS prepared the data in. None: TFDS's own default.
        `mnist_subset` comes with the program and ignores it.

    Raises:
      DataError: There is no such data set, split or file.
    """
    builder = _builder(get_dataset(name).name, data_dir)
    known = ", ".join(builder.info.splits)
    try:
        files = builder.info.splits[split].filepaths
        decoders = {"image": tfds.decode.SkipDecoding()}
        # A decorator of TFDS's hides the arguments from type checkers.
        source = builder.as_data_source(split=split, decoders=decoders)  # type: ignore
    except (ValueError, AssertionError, KeyError) as error:
        raise DataError(
            f"Cannot read split {split!r} of {name}: {error} "
            f"Give one of {known}, or a non-empty part such as 'train[:100]'."
        ) from error
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(files)} files of {name} {split} are not in "
            f"{builder.data_path}, the first is {missing[0]}. Copy or prepare it anew."
        )
    return Records(source, f"{name} {split} in {builder.data_path}")


def check_data(name: str, data_dir: str | os.PathLike | None) -> None:
    """Raises a DataError unless both splits that a run reads are there."""
    dataset = get_dataset(name)
    for split in (dataset.train_split, dataset.eval_split):
        records = open_split(name, split=split, data_dir=data_dir)
        records.__getitems__([0, len(records) - 1])


def _builder(name: str, data_dir: str | os.PathLike | None) -> tfds.core.DatasetBuilder:
    """Returns TFDS's reader, having made sure that there is something to read."""
    if name == "mnist_subset":
        return tfds.builder_from_directory(EMBEDDED)
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except Exception as error:  # such as a parser's, of a damaged dataset_info.json
        raise DataError(f"Cannot read {name} in {data_dir}: {error}") from error
    prepare = (
        f"prepare it once with `tfds build {name} --file_format=array_record`, which "
        "needs TensorFlow (reading does not), and pass its folder as --data-dir"
    )
    # Unasked, TFDS would try for minutes to download the data.
    if not builder.is_prepared():
        hint = "the data set mnist_subset needs no files"
        raise DataError(f"{name} is not in {builder.data_path}: {prepare}; {hint}.")
    formats = builder.info.available_file_formats()
    if tfds.core.FileFormat.ARRAY_RECORD not in formats:
        found = ", ".join(sorted(f.value for f in formats))
        raise DataError(
            f"{builder.data_path} holds {found}, not array_record: {prepare}."
        )
    return builder


def load_arrays(
    name: str,
    *,
    split: str,
    data_dir: str | os.PathLike | None = None,
    max_corrupt: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a whole split of a small data set: images and labels.

    >>> images, labels = load_arrays("mnist_subset", split="test[:100]")
    >>> images.shape, images.dtype, labels.shape, labels.dtype
    ((100, 28, 28, 1), dtype('uint8'), (100,), dtype('int32'))

    Args:
      name: See `open_split`, for `split` and `data_dir` too.
      split: A training split may have holes, one for evaluation should have none.
      data_dir: None: TFDS's own default.
      max_corrupt: How many unreadable pictures to log and leave out.

    Raises:
      DataError: See `open_split`; or more pictures are corrupt or of another size.
    """
    shape = get_dataset(name).image_shape
    if shape is None:
        raise DataError(f"{name} is read from disk as it goes, not as one array.")
    source = open_split(name, split=split, data_dir=data_dir)
    corrupt = CorruptPictures(max_corrupt)
    images, labels = [], []
    for number, record in enumerate(source.__getitems__(range(len(source)))):
        try:
            picture = Image.open(io.BytesIO(record["image"]), formats=("PNG", "JPEG"))
            images.append(np.asarray(picture, np.uint8).reshape(shape))
            labels.append(record["label"])
        except Exception as error:  # Pillow's parsers raise whatever they trip over.
            corrupt.add(f"example {number} of {source.name}", type(error).__name__)
    return np.stack(images), np.array(labels, np.int32)
