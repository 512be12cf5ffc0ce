"""Settings for every test: four CPU devices, strict promotion, checked shapes."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from hypothesis import settings
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Shapes and dtypes of the core's signatures are checked in every call.
install_import_hook("bnjax", "beartype.beartype")

# The first call compiles; the same examples in each run.
settings.register_profile("bnjax", deadline=None, derandomize=True)
settings.load_profile("bnjax")
