"""The examples of README and docs run as they stand."""

import pathlib
import re

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run_examples(page):
    """Runs the examples of a page in order; returns the names that they make."""
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    variables = {"__name__": "__main__"}
    # A reader has the default settings.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in examples:
            exec(example, variables)
    return variables


@pytest.fixture(scope="module")
def names():
    return run_examples(ROOT / "README.md")


def test_the_recipes_run():
    run_examples(ROOT / "docs" / "recipes.md")


def test_the_first_example_normalizes_and_moves_the_running_values(names):
    np.testing.assert_allclose(names["batch_stats"].mean, np.ones(16), rtol=1e-2)


def test_the_second_example_is_one_batch_over_all_devices(names):
    assert jax.device_count() == 4
    assert names["logits"].shape == (4, 8, 10)
    mean = names["updates"]["batch_stats"]["BatchNorm_0"]["mean"]
    assert mean.shape == (8,)
