"""From the bytes of a picture file to uint8 pixels of a fixed size, on the host."""

import io
import math

import numpy as np
from PIL import Image

AREA = 0.08, 1.0  # of a random crop, as a fraction of the picture
ASPECT = 3 / 4, 4 / 3  # its width divided by its height
LOG_ASPECT = math.log(ASPECT[0]), math.log(ASPECT[1])
ATTEMPTS = 10


def random_resized_crop(
    data: bytes, rng: np.random.Generator, *, size: int
) -> np.ndarray:
    """Returns GoogLeNet's training crop, uint8 of shape `(size, size, 3)`."""
    with Image.open(io.BytesIO(data)) as image:
        return _crop(image, random_box(rng, *image.size), size)


def central_crop(data: bytes, *, size: int) -> np.ndarray:
    """Returns the evaluation crop, uint8 of shape `(size, size, 3)`.

    It is the central square that remains when the shorter side has been resized to
    `size * 256 / 224`.
    """
    with Image.open(io.BytesIO(data)) as image:
        return _crop(image, central_box(*image.size), size)


def random_box(
    rng: np.random.Generator, width: int, height: int
) -> tuple[float, float, float, float]:
    """Returns a random box `(left, upper, right, lower)` in pixels, not rounded.

    Its area is uniform in `AREA`, the logarithm of its aspect ratio in `ASPECT`. A
    picture too long for ten boxes out of ten gets the largest central box of allowed
    aspect, whose area may lie under the limit.
    """
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*AREA)
        aspect = math.exp(rng.uniform(*LOG_ASPECT))
        w, h = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if w <= width and h <= height:
            left, upper = rng.uniform(0, width - w), rng.uniform(0, height - h)
            # Rounding may leave the sums a hair outside, which Pillow refuses.
            return left, upper, min(left + w, width), min(upper + h, height)
    w, h = min(width, height * ASPECT[1]), min(height, width / ASPECT[0])
    left, upper = (width - w) / 2, (height - h) / 2
    return left, upper, left + w, upper + h


def central_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Returns the square of 224/256 of the shorter side, in the middle."""
    side = min(width, height) * 224 / 256
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def _crop(
    image: Image.Image, box: tuple[float, float, float, float], size: int
) -> np.ndarray:
    """Returns the box, resized with antialiasing."""
    width, height = image.size
    left, upper, right, lower = box
    # A JPEG can be decoded at 1/2, 1/4 or 1/8: half the time for a large picture, which
    # stays at least as fine as the crop. Other formats return None.
    wanted = width * size / (right - left), height * size / (lower - upper)
    drafted = image.draft("RGB", (math.ceil(wanted[0]), math.ceil(wanted[1])))
    scale = 1 if drafted is None else width / drafted[1][2]
    if image.mode != "RGB":
        image = image.convert("RGB")
    box = left / scale, upper / scale, right / scale, lower / scale
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box))
