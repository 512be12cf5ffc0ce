import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tiny_imagenet import picture

from train import crops


@given(
    seed=st.integers(0, 2**31),
    width=st.integers(50, 2000),
    aspect=st.floats(0.4, 2.5),
)
def test_a_random_box_keeps_to_area_and_aspect(seed, width, aspect):
    height = round(width / aspect)
    box = crops.random_box(np.random.default_rng(seed), width, height)
    left, upper, right, lower = box
    assert 0 <= left < right <= width
    assert 0 <= upper < lower <= height
    w, h = right - left, lower - upper
    assert 0.08 - 1e-9 <= w * h / (width * height) <= 1 + 1e-9
    assert 3 / 4 - 1e-9 <= w / h <= 4 / 3 + 1e-9


def test_a_picture_too_long_for_the_limits_keeps_the_aspect():
    left, upper, right, lower = crops.random_box(np.random.default_rng(0), 3000, 30)
    assert (left, upper, right, lower) == (1480, 0, 1520, 30)


def test_the_areas_of_random_boxes_spread_over_the_range():
    rng = np.random.default_rng(0)
    boxes = np.array([crops.random_box(rng, 100, 100) for _ in range(500)])
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) / 100**2
    assert areas.min() < 0.1
    assert areas.max() > 0.9


@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG")]
)
def test_any_picture_becomes_rgb(mode, kind):
    crop = crops.central_crop(picture(0, mode=mode, kind=kind), size=16)
    assert crop.shape == (16, 16, 3)
    assert crop.dtype == np.uint8


def test_the_central_crop_is_the_middle_of_the_resized_picture():
    encoded = picture(3, kind="PNG", size=(400, 300))
    whole = Image.open(io.BytesIO(encoded)).resize(
        (341, 256), Image.Resampling.BILINEAR
    )
    middle = np.asarray(whole)[16:240, 58:282].astype(int)
    difference = np.abs(crops.central_crop(encoded, size=224) - middle)
    assert difference.mean() < 1  # of 255; 400 · 256/300 is not quite 341


def test_decoding_a_jpeg_small_gives_the_picture_decoded_whole():
    encoded = picture(4, size=(640, 480))
    small = crops.central_crop(encoded, size=56).astype(int)
    with Image.open(io.BytesIO(encoded)) as image:
        box = crops.central_box(640, 480)
        whole = image.resize((56, 56), Image.Resampling.BILINEAR, box)
    assert np.abs(small - np.asarray(whole)).mean() < 2  # of 255
