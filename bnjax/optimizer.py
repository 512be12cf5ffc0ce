"""What an optimizer may touch, and what an L2 penalty may shrink."""

import collections
from typing import Any

import jax

LAYER = {"mean", "var", "count", "scale", "bias"}


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


def check_optimizer_tree(params: Any) -> None:
    """Raises when running statistics are among what an optimizer is to update.

    Their gradient is 0, so nothing else tells; but weight decay would shrink them,
    and momentum and checkpoints carry them twice.

    Args:
      params: What is passed to `optimizer.init`: a tree of Linen, NNX or plain dicts.

    Raises:
      ValueError: Some leaves are running statistics: in a collection `batch_stats`, of
        the type `nnx.BatchStat`, or named `mean` and `var` in a layer that has nothing
        else but a count, a scale and a bias.

    >>> check_optimizer_tree({"bn": {"scale": 1.0, "bias": 0.0}})
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_batch_stat)
    siblings = collections.defaultdict(set)
    for path, _ in leaves:
        *parent, name = _names(path) or ("",)
        siblings[tuple(parent)].add(name)
    # A layer that holds nothing but these is one of normalization.
    layers = {p for p, n in siblings.items() if {"mean", "var"} <= n <= LAYER}
    found = []
    for path, leaf in leaves:
        *parent, name = _names(path) or ("",)
        in_layer = tuple(parent) in layers and name not in ("scale", "bias")
        if in_layer or "batch_stats" in parent or _is_batch_stat(leaf):
            found.append("/".join([*parent, name]))
    if found:
        raise ValueError(
            f"The optimizer is given running statistics: {', '.join(found[:4])}"
            f"{' and others' if len(found) > 4 else ''}. Give it the parameters alone: "
            'variables["params"] in Linen, nnx.state(model, nnx.Param) in NNX.'
        )


def _is_batch_stat(leaf: Any) -> bool:
    # By name, since this module must not import Flax.
    return any(kind.__name__ == "BatchStat" for kind in type(leaf).__mro__)


def _leaf_name(path: tuple[Any, ...]) -> str:
    """Returns the last part of a path that is not a place in a list."""
    return next((name for name in reversed(_names(path)) if not name.isdigit()), "")


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the parts of a path; NNX ends its own in `.value`."""
    keys = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", ""))) for k in path)
    return tuple(name for name in map(str, keys) if name not in ("", "value"))
