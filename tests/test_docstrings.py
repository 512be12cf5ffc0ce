"""The examples in docstrings."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import bnjax

MODULES = [
    name
    for _, name, _ in pkgutil.iter_modules(bnjax.__path__, "bnjax.")
    if name != "bnjax.models"
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_right(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    module = importlib.import_module(name)
    extra = {"jnp": jnp, "jax": jax, **vars(bnjax)}
    assert doctest.testmod(module, extraglobs=extra).failed == 0
