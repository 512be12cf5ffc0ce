"""Which data sets there are, and their records as TFDS prepared them."""

import io
import logging
import os
import pathlib
from typing import NamedTuple

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
) -> BaseDataSource:
    """Returns the records of a split; their "image" is the bytes of a picture file.

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
        decoders = {"image": tfds.decode.SkipDecoding()}
        # A decorator of TFDS's hides the arguments from type checkers.
        return builder.as_data_source(split=split, decoders=decoders)  # type: ignore
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"Cannot read split {split!r} of {name}: {error} "
            f"Give one of {known}, or a non-empty part such as 'train[:100]'."
        ) from error


def check_data(name: str, data_dir: str | os.PathLike | None) -> None:
    """Raises a DataError unless both splits that a run reads are there."""
    dataset = get_dataset(name)
    for split in (dataset.train_split, dataset.eval_split):
        source = open_split(name, split=split, data_dir=data_dir)
        try:
            _ = source[0], source[len(source) - 1]
        except Exception as error:  # of whatever kind a broken file brings about
            raise DataError(f"Cannot read {split} of {name}: {error}") from error


def _builder(name: str, data_dir: str | os.PathLike | None) -> tfds.core.DatasetBuilder:
    """Returns TFDS's reader, having made sure that there is something to read."""
    if name == "mnist_subset":
        return tfds.builder_from_directory(EMBEDDED)
    builder = tfds.builder(name, data_dir=data_dir)
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
    name: str, *, split: str, data_dir: str | os.PathLike | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a whole split of a small data set: images and labels.

    >>> images, labels = load_arrays("mnist_subset", split="test[:100]")
    >>> images.shape, images.dtype, labels.shape, labels.dtype
    ((100, 28, 28, 1), dtype('uint8'), (100,), dtype('int32'))

    Raises:
      DataError: See `open_split`; or a picture is corrupt or of another size.
    """
    shape = get_dataset(name).image_shape
    if shape is None:
        raise DataError(f"{name} is read from disk as it goes, not as one array.")
    # One read of all: it costs a fraction of as many single ones.
    source = open_split(name, split=split, data_dir=data_dir)
    records = source.__getitems__(range(len(source)))
    images = np.empty((len(records), *shape), np.uint8)
    for number, record in enumerate(records):
        try:
            picture = Image.open(io.BytesIO(record["image"]), formats=("PNG", "JPEG"))
            images[number] = np.asarray(picture).reshape(shape)
        except (OSError, ValueError) as error:
            raise DataError(
                f"Example {number} of {name} {split} is corrupt: {error}"
            ) from error
    return images, np.array([record["label"] for record in records], np.int32)
