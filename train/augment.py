"""What happens to a picture on the device: a few random distortions, then scaling.

The randomness is per example, so it does not depend on which device has the example.
"""

import functools
from typing import NamedTuple

import dm_pix
import jax
import jax.numpy as jnp
from jax import lax


class Ranges(NamedTuple):
    """How far each photometric distortion may go."""

    brightness: float  # added: ± this
    contrast: float  # factor: 1 ± this
    saturation: float  # factor: 1 ± this
    hue: float  # turned by ± this; 1 is the full circle


PHOTOMETRIC = {
    "none": None,
    # Section 4.2.1: a network that sees each example fewer times should see more "real"
    # images. The paper gives no numbers; this is a quarter of the full ranges.
    "weak": Ranges(brightness=8 / 255, contrast=0.125, saturation=0.125, hue=0.05),
    # As in the published training code of Inception.
    "full": Ranges(brightness=32 / 255, contrast=0.5, saturation=0.5, hue=0.2),
}


def augment(
    keys: jax.Array,
    images: jax.Array,
    *,
    mirror: bool,
    crop_padding: int,
    photometric: str,
) -> jax.Array:
    """Returns randomly distorted images.

    >>> images = jnp.zeros((2, 32, 32, 3), jnp.uint8)
    >>> keys = jax.random.split(jax.random.key(0), 2)
    >>> augment(keys, images, mirror=True, crop_padding=4, photometric="none").shape
    (2, 32, 32, 3)

    Args:
      keys: `(B,)` typed PRNG keys, one for each example.
      images: `(B, H, W, C)` uint8.
      mirror: Static. Flip left and right with probability 1/2.
      crop_padding: Static. Black pixels put around the image before a random crop of
        its own size; 0: no crop.
      photometric: Static. Which of `PHOTOMETRIC`: random brightness and contrast, and
        for three channels saturation and hue.

    Returns:
      `(B, H, W, C)` float32 in [0, 1].

    Raises:
      ValueError: `photometric` is not one of `PHOTOMETRIC`, or `crop_padding` < 0.
    """
    if photometric not in PHOTOMETRIC:
        raise ValueError(
            f"photometric={photometric!r} is none of {', '.join(PHOTOMETRIC)}."
        )
    if crop_padding < 0:
        raise ValueError(f"crop_padding={crop_padding} must be at least 0.")
    augment_one = functools.partial(
        _augment_one,
        mirror=mirror,
        crop_padding=crop_padding,
        ranges=PHOTOMETRIC[photometric],
    )
    return jax.vmap(augment_one)(keys, images)


def standardize(images: jax.Array) -> jax.Array:
    """Returns float32 images in [-1, 1], as the networks take them.

    >>> standardize(jnp.array([0, 255], jnp.uint8)).tolist()
    [-1.0, 1.0]

    Args:
      images: uint8, or floats in [0, 1]; any shape.
    """
    if images.dtype == jnp.uint8:
        images = images.astype(jnp.float32) / 255
    return 2 * images.astype(jnp.float32) - 1


def _augment_one(key, image, *, mirror, crop_padding, ranges):
    """`augment` for one key and one `(H, W, C)` image."""
    # All numbers in one draw: seven draws compile for seconds.
    u = jax.random.uniform(key, (7,), jnp.float32)
    if mirror:
        image = jnp.where(u[0] < 0.5, image[:, ::-1], image)
    if crop_padding:
        image = _shift(image, u[1:3], crop_padding)
    image = image.astype(jnp.float32) / 255
    if ranges is not None:
        image = _distort(image, 2 * u[3:] - 1, ranges)
    return jnp.clip(image, 0, 1)


def _shift(image, u, padding):
    """Returns the window at `u` in [0, 1)² of the image in a black frame."""
    framed = jnp.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    corner = jnp.floor(u * (2 * padding + 1)).astype(jnp.int32)
    return lax.dynamic_slice(framed, (*corner, jnp.int32(0)), image.shape)


def _distort(image, v, ranges):
    """Returns the image at `v` in [-1, 1)⁴ of the ranges, not clipped."""
    # dm-pix leans on the implicit promotions that a caller may have switched off.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if image.shape[-1] == 3:
            # These two first: they take, and keep, values in [0, 1].
            image = dm_pix.adjust_saturation(image, 1 + ranges.saturation * v[0])
            image = dm_pix.adjust_hue(image, ranges.hue * v[1])
        image = dm_pix.adjust_brightness(image, ranges.brightness * v[2])
        return dm_pix.adjust_contrast(image, 1 + ranges.contrast * v[3])
