"""A tiny imagenet2012, prepared by TFDS's own builder."""

import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.core import registered


def picture(seed, *, mode="RGB", kind="JPEG", size=(64, 48)):
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode).save(
        file, kind
    )
    return file.getvalue()


def write_tfds(data_dir, *, name, splits, file_format="array_record"):
    """Prepares a data set by TFDS's own builder: names of pictures, and their bytes."""

    def record(self, key, label, data):
        named = {"file_name": key} if "file_name" in self.info.features else {}
        return key, {**named, "label": label, "image": data}

    def generators(self, manager):
        return {
            split: (
                record(self, key, i % 10, data)
                for i, (key, data) in enumerate(files.items())
            )
            for split, files in splits.items()
        }

    base = tfds.builder_cls(name)
    own = {"name": name, "__module__": base.__module__}
    own |= {"pkg_dir_path": base.pkg_dir_path, "_split_generators": generators}
    with registered.skip_registration():
        cls = type("Builder", (base,), own)
    config = tfds.download.DownloadConfig(
        compute_stats=tfds.download.ComputeStatsMode.SKIP, try_download_gcs=False
    )
    builder = cls(data_dir=data_dir, file_format=file_format)
    builder.download_and_prepare(download_config=config)


def prepare(folder):
    """Writes it; split "broken" has a truncated picture and something else."""
    train = {f"n{i}.JPEG": picture(i) for i in range(7)}
    train["grey.JPEG"] = picture(7, mode="L")
    train["cmyk.JPEG"] = picture(8, mode="CMYK")
    train["png.JPEG"] = picture(9, kind="PNG")
    train["large.JPEG"] = picture(10, size=(640, 480))
    validation = {f"v{i}.JPEG": picture(100 + i) for i in range(5)}
    broken = {"good.JPEG": picture(0), "cut.JPEG": picture(1)[:-200], "no.JPEG": b"no"}
    splits = {"train": train, "validation": validation, "broken": broken}
    write_tfds(folder, name="imagenet2012", splits=splits)
