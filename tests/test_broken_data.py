"""What happens with data sets that are damaged."""

import io
import shutil

import jax
import numpy as np
import pytest
import tiny_imagenet
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from train import data, sources
from train.data import DataError

STREAM = {"name": "imagenet2012", "image_size": 32, "batch_size": 3}
STREAM["sharding"] = NamedSharding(
    Mesh(np.array(jax.devices()[:1]), ("batch",)), PartitionSpec("batch")
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tiny_imagenet.prepare(folder)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """A data_dir to be damaged, and the folder of its files."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (version,) = (tmp_path / "imagenet2012").iterdir()
    return tmp_path, version


def shard(version, split):
    (path,) = version.glob(f"*-{split}.array_record-*")
    return path


# Pictures


def test_an_unreadable_training_picture_is_masked_and_named(whole, caplog):
    batches = data.train_batches(**STREAM, split="broken", data_dir=whole, seed=0)
    batch = next(batches)
    assert batch["mask"].sum() == 1
    np.testing.assert_array_equal(batch["image"].any((1, 2, 3)), batch["mask"])
    assert "cut.JPEG" in caplog.text
    assert "no.JPEG" in caplog.text


def test_too_many_unreadable_pictures_end_the_training(whole):
    options = STREAM | {"split": "broken", "data_dir": whole, "max_corrupt": 1}
    with pytest.raises(DataError, match=r"(cut|no)\.JPEG is .*, and 1 such pictures"):
        next(data.train_batches(**options, seed=0))


def test_an_unreadable_picture_counts_once_in_many_epochs(whole, caplog):
    options = STREAM | {"split": "broken", "data_dir": whole, "max_corrupt": 2}
    batches = data.train_batches(**options, seed=0)
    for _ in range(5):
        next(batches)
    assert caplog.text.count("cut.JPEG") == caplog.text.count("no.JPEG") == 1


def test_an_unreadable_picture_ends_the_evaluation(whole):
    batches = data.eval_batches(**STREAM, split="broken", data_dir=whole)
    with pytest.raises(DataError, match=r"(cut|no)\.JPEG"):
        next(batches)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """An mnist whose second training picture is no picture, and third too large."""
    folder = tmp_path_factory.mktemp("mnist")

    def png(value, side=28):
        file = io.BytesIO()
        Image.fromarray(np.full((side, side), value, np.uint8)).save(file, "PNG")
        return file.getvalue()

    train = {"0": png(0), "1": b"no", "2": png(2, side=5), "3": png(3)}
    tiny_imagenet.write_tfds(
        folder, name="mnist", splits={"train": train, "test": {"0": png(0)}}
    )
    return folder


def test_unreadable_digits_are_left_out_of_training_and_named(digits, caplog):
    options = {"split": "train", "data_dir": digits}
    images, labels = sources.load_arrays("mnist", **options, max_corrupt=2)
    np.testing.assert_array_equal(images[:, 0, 0, 0], labels)
    assert sorted(labels.tolist()) == [0, 3]
    assert caplog.text.count(f"of mnist train in {digits}") == 2


def test_an_unreadable_digit_ends_the_evaluation(digits):
    with pytest.raises(DataError, match=r"example \d of mnist train in .*unreadable"):
        sources.load_arrays("mnist", split="train", data_dir=digits)


# Files


def test_missing_files_are_counted_before_anything_is_read(copy):
    data_dir, version = copy
    shard(version, "validation").unlink()
    with pytest.raises(DataError, match=r"1 of 1 files of imagenet2012 validation .*"):
        sources.check_data("imagenet2012", data_dir)


def test_a_file_that_is_cut_off_is_named(copy):
    data_dir, version = copy
    shard(version, "train").write_bytes(b"short")
    with pytest.raises(DataError, match=f"Cannot read imagenet2012 train in {version}"):
        sources.check_data("imagenet2012", data_dir)


def test_a_damaged_description_is_said(copy):
    data_dir, version = copy
    (version / "dataset_info.json").write_text('{"name')
    with pytest.raises(DataError, match=f"Cannot read imagenet2012 in {data_dir}"):
        sources.check_data("imagenet2012", data_dir)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_file_that_breaks_while_training_is_named(copy, num_workers):
    data_dir, version = copy
    options = STREAM | {"data_dir": data_dir, "num_workers": num_workers}
    batches = data.train_batches(**options, seed=0)
    path = shard(version, "train")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"Cannot read imagenet2012 train in {version}"):
        next(batches)
