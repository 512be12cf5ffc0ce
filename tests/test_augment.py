import doctest

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train import augment
from train.augment import standardize

OFF = {"mirror": False, "crop_padding": 0, "photometric": "none"}
ALL = {"mirror": True, "crop_padding": 4, "photometric": "full"}
augmented = jax.jit(augment.augment, static_argnames=tuple(OFF))


def pictures(*, count=8, channels=3):
    shape = (count, 12, 12, channels)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def keys(count=8, *, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def test_nothing_asked_for_changes_nothing():
    y = augmented(keys(), pictures(), **OFF)
    np.testing.assert_allclose(y, pictures() / 255, rtol=1e-6)


def test_mirroring_flips_about_half_of_the_images():
    x = pictures(count=200)
    y = np.asarray(augmented(keys(200), x, **OFF | {"mirror": True})) * 255
    same = np.abs(y - x).max((1, 2, 3)) < 0.1
    flipped = np.abs(y - x[:, :, ::-1]).max((1, 2, 3)) < 0.1
    assert (same ^ flipped).all()
    assert 70 < flipped.sum() < 130  # 4 σ around 100


def test_a_crop_is_a_window_of_the_framed_image():
    x = pictures(count=50)
    y = np.asarray(augmented(keys(50), x, **OFF | {"crop_padding": 1})) * 255
    framed = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    corners = [(i, j) for i in range(3) for j in range(3)]
    windows = np.stack([framed[:, i : i + 12, j : j + 12] for i, j in corners])
    matches = np.abs(windows - y).max((2, 3, 4)) < 0.1
    np.testing.assert_array_equal(matches.sum(0), 1)
    assert matches.any(1).all()  # each corner occurs


@pytest.mark.parametrize("photometric", ["none", "weak", "full"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_stay_in_range(photometric, channels):
    x = pictures(channels=channels)
    y = augmented(keys(), x, **ALL | {"photometric": photometric})
    chex.assert_shape(y, x.shape)
    chex.assert_type(y, jnp.float32)
    assert 0 <= y.min() <= y.max() <= 1


def test_weak_distortions_move_pixels_less_than_full_ones():
    x = pictures()
    plain = augmented(keys(), x, **ALL | {"photometric": "none"})
    weak, full = (
        np.abs(augmented(keys(), x, **ALL | {"photometric": p}) - plain).mean()
        for p in ("weak", "full")
    )
    assert 0 < weak < full / 2


def test_grey_images_stay_free_of_colour():
    x = np.repeat(pictures(channels=1), 3, axis=-1)
    y = np.asarray(augmented(keys(), x, **ALL))
    np.testing.assert_allclose(y, np.repeat(y[..., :1], 3, axis=-1), atol=1e-6)


def test_an_image_is_augmented_by_its_own_key():
    x, k = pictures(), keys()
    whole = augmented(k, x, **ALL)
    alone = augmented(k[3:4], x[3:4], **ALL)
    np.testing.assert_allclose(whole[3:4], alone, atol=1e-6)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_augmentation_does_not_depend_on_the_sharding(num_devices):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), "batch")
    sharding = NamedSharding(mesh, PartitionSpec("batch"))
    sharded = augmented(*jax.device_put((keys(), pictures()), sharding), **ALL)
    assert sharded.sharding.is_equivalent_to(sharding, 4)
    whole = augmented(keys(), pictures(), **ALL)
    np.testing.assert_allclose(sharded, whole, atol=1e-6)


def test_an_unknown_distortion_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'strong' is none of none, weak, full"):
        augmented(keys(), pictures(), **OFF | {"photometric": "strong"})


def test_a_negative_padding_is_refused():
    with pytest.raises(ValueError, match="crop_padding=-1 must be at least 0"):
        augmented(keys(), pictures(), **OFF | {"crop_padding": -1})


def test_standardize_maps_bytes_and_fractions_alike():
    x = pictures()
    y = standardize(jnp.asarray(x))
    chex.assert_type(y, jnp.float32)
    np.testing.assert_allclose(y, x / 127.5 - 1, atol=1e-6)
    fractions = jnp.asarray(x, jnp.float32) / 255
    np.testing.assert_array_equal(y, standardize(fractions))


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(augment).failed == 0
