"""One program on every device: the mesh, and a step spread over it."""

import os
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.config import Config, RunError

AXIS = "batch"
SIMULATED_DEVICES = 4

Step = Callable[[Any, Any], tuple[Any, Any]]


def simulate_devices() -> None:
    """Splits a lone CPU into four devices; call it before JAX is first used."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if jax.config.values["jax_num_cpu_devices"] < 0:
        # Says nothing about other backends: with a GPU or TPU its devices are used.
        jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)


def make_mesh() -> Mesh:
    """Returns a mesh of one axis over the devices of all processes."""
    return Mesh(jax.devices(), (AXIS,))


def sharded(mesh: Mesh) -> NamedSharding:
    """Returns the layout of a batch: rows over the devices."""
    return NamedSharding(mesh, P(AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the layout of a state: the same on every device."""
    return NamedSharding(mesh, P())


def check_layout(config: Config, mesh: Mesh) -> None:
    """Raises unless the run can be spread over the devices."""
    parts = mesh.size * config.accumulate
    if config.batch_size % parts:
        times = (
            f" times accumulate={config.accumulate}" if config.accumulate > 1 else ""
        )
        raise RunError(
            f"batch_size={config.batch_size} is the global batch and does not divide "
            f"over {mesh.size} devices{times}. Choose a multiple of {parts}."
        )
    if config.parallel == "pmap" and jax.process_count() > 1:
        raise RunError(
            "parallel='pmap' serves one process. Over several, use 'shard_map'."
        )


def parallelize(step: Step, mesh: Mesh, how: str) -> Step:
    """Returns `(state, batch) -> (state, metrics)` over the whole mesh.

    Args:
      step: Of one device, over its own rows. Its results are the same on all.
      mesh: Of one axis, AXIS.
      how: "shard_map", or "pmap" for one process.

    Returns:
      A compiled function of a replicated state, which it may overwrite, and a batch
      laid out as `sharded(mesh)`.
    """
    if how == "shard_map":
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())
        return jax.jit(mapped, donate_argnums=0)
    mapped = jax.pmap(
        step, AXIS, in_axes=(None, 0), out_axes=None, devices=list(mesh.devices)
    )

    def split_rows(state: Any, batch: Any) -> tuple[Any, Any]:
        rows = jax.tree.map(lambda a: a.reshape(mesh.size, -1, *a.shape[1:]), batch)
        return mapped(state, rows)

    return split_rows
