import doctest
import hashlib
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
import tiny_imagenet

from train import sources


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tiny_imagenet.prepare(folder)
    return folder


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imagenet2012"])
def test_missing_data_are_reported_at_once(name, tmp_path, monkeypatch):
    # What TFDS does of itself: minutes of tries to download.
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", None)
    with pytest.raises(sources.DataError) as error:
        sources.open_split(name, split="train", data_dir=tmp_path)
    message = str(error.value)
    assert message.startswith(f"{name} is not in {tmp_path / name}")
    assert "needs TensorFlow" in message
    assert "--data-dir" in message
    assert "\n" not in message
    assert not any(tmp_path.iterdir())


def test_data_in_another_file_format_are_reported(tmp_path, data_dir):
    whole = tfds.builder("imagenet2012", data_dir=data_dir).data_path
    copy = tmp_path / "imagenet2012" / whole.name
    copy.mkdir(parents=True)
    info = (whole / "dataset_info.json").read_text()
    (copy / "dataset_info.json").write_text(info.replace("array_record", "tfrecord"))
    (copy / "features.json").write_text((whole / "features.json").read_text())
    with pytest.raises(sources.DataError, match="holds tfrecord, not array_record"):
        sources.open_split("imagenet2012", split="train", data_dir=tmp_path)


def test_an_unknown_data_set_is_answered_with_the_known_ones():
    with pytest.raises(sources.DataError, match=r"'minst'.*: mnist_subset, mnist, "):
        sources.get_dataset("minst")


@pytest.mark.parametrize("split", ["tset", "train[:0]", "train[9000:]"])
def test_an_unknown_or_empty_split_is_answered_with_the_known_ones(split):
    with pytest.raises(
        sources.DataError, match=r"of mnist_subset.*one of train, test"
    ) as e:
        sources.open_split("mnist_subset", split=split)
    assert repr(split) in str(e.value)


def test_the_embedded_sample_is_the_start_of_mnist():
    images, labels = sources.load_arrays("mnist_subset", split="test")
    assert images.shape == (2000, 28, 28, 1)
    counts = [203, 219, 222, 196, 183, 180, 195, 208, 203, 191]
    np.testing.assert_array_equal(np.bincount(labels), counts)
    assert hashlib.sha256(images.tobytes()).hexdigest().startswith("c97b1a0cd13aa803")


def test_nothing_imports_tensorflow():
    assert "tensorflow" not in sys.modules


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(sources).failed == 0
