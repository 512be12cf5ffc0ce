"""Which parameters an L2 penalty may shrink."""

from typing import Any

import jax


def weight_decay_mask(params: Any) -> Any:
    """Returns a tree of bool like `params`: False for scales and biases.

    Weight decay on γ and β of a normalized layer does not regularize the function
    that the network computes. By path, not by rank: parameters stacked by scan or
    vmap have more axes. For `optax.add_decayed_weights(rate, mask=weight_decay_mask)`.

    Args:
      params: Parameters of a Flax model, or any tree with the leaf names of Flax.

    >>> weight_decay_mask({"conv": {"kernel": 1.0, "bias": 0.0}})
    {'conv': {'bias': False, 'kernel': True}}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _leaf_name(path) not in ("scale", "bias"), params
    )


def _leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the last named part of a path; NNX ends its own in `.value`."""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    return next((n for n in reversed(names) if n not in ("", "value")), "")
