"""The README's examples run as they stand."""

import pathlib
import re

import jax
import numpy as np
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def names():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 2
    variables = {}
    # A reader has the default settings.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in examples:
            exec(example, variables)
    return variables


def test_the_first_example_normalizes_and_moves_the_running_values(names):
    np.testing.assert_allclose(names["batch_stats"].mean, np.ones(16), rtol=1e-2)


def test_the_second_example_is_one_batch_over_all_devices(names):
    assert jax.device_count() == 4
    assert names["logits"].shape == (4, 8, 10)
    mean = names["updates"]["batch_stats"]["BatchNorm_0"]["mean"]
    assert mean.shape == (8,)
