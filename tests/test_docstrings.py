"""The examples in docstrings."""

import doctest
import importlib
import pkgutil
import types

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
    public = {
        name: value
        for name, value in vars(bnjax).items()
        if not isinstance(value, types.ModuleType)
    }
    extra = {"jnp": jnp, "jax": jax, **public}
    assert doctest.testmod(module, extraglobs=extra).failed == 0
