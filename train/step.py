"""Training and evaluation as pure functions of a state and a batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import Array, lax

import bnjax
from bnjax.linen import BatchNorm
from bnjax.models import MLP, Inception
from bnjax.transform import compute_dtype
from train.accumulation import add_microbatches
from train.augment import augment, standardize
from train.config import Config
from train.data import DATASETS

SMALL_IMAGE = 64  # the largest side for which the small stem is meant
# XLA:CPU would optimize for a minute what runs once, for a millisecond.
FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

Batch = dict[str, Array]  # image (N, H, W, C) uint8, label (N,), maybe mask (N,)


class TrainState(NamedTuple):
    """All that a checkpoint holds."""

    step: Array  # int32; updates made
    params: Any
    batch_stats: Any
    opt_state: Any
    position: Array  # int32; examples drawn from the stream of the run's seed


def make_model(config: Config, axis_name: str | None = None) -> nn.Module:
    """Returns the network; its statistics are shared over `axis_name`."""
    activation = {"relu": nn.relu, "sigmoid": nn.sigmoid}[config.activation]
    norm = functools.partial(
        BatchNorm, momentum=config.bn_momentum, axis_name=axis_name
    )
    common: dict[str, Any] = {
        "num_classes": DATASETS[config.dataset].num_classes,
        "norm": norm if config.batch_norm else None,
        "activation": activation,
    }
    if config.model == "mlp":
        return MLP(**common, dtype=jnp.dtype(config.dtype))
    side = image_shape(config)[0]
    return Inception(
        **common,
        dropout_rate=config.dropout_rate,
        local_response_norm=config.local_response_norm,
        stem="small" if side <= SMALL_IMAGE else "imagenet",
        width=config.width,
        axis_name=axis_name,
        dtype=jnp.dtype(config.dtype),
    )


def image_shape(config: Config) -> tuple[int, int, int]:
    """Returns `(H, W, C)` of the network's input."""
    shape = DATASETS[config.dataset].image_shape
    return shape or (config.image_size, config.image_size, 3)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Returns SGD with momentum, L2 on kernels and exponential decay (Section 4.2)."""
    schedule = optax.exponential_decay(
        config.learning_rate, config.decay_steps, config.decay_rate, staircase=True
    )
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, bnjax.weight_decay_mask),
        optax.sgd(schedule, config.sgd_momentum or None),
    )


def init_state(config: Config) -> TrainState:
    """Returns the state before the first step, a function of the seed alone."""
    model, optimizer = make_model(config), make_optimizer(config)
    image = jax.ShapeDtypeStruct((1, *image_shape(config)), jnp.float32)
    # Lazily: XLA would fold the whole network's answer to an image of zeros.
    key = stream_key(config.seed, "init")
    variables = model.lazy_init(key, image, train=False)
    dtype = compute_dtype(config.dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), variables["params"])
    bnjax.check_optimizer_tree(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables.get("batch_stats", {}),
        opt_state=optimizer.init(params),
        position=jnp.zeros((), jnp.int32),
    )


def first_state(config: Config, sharding: Any = None) -> TrainState:
    """Returns `init_state` as one program, laid out as `sharding`."""
    initialize = jax.jit(
        functools.partial(init_state, config),
        out_shardings=sharding,
        compiler_options=FAST_COMPILE if jax.default_backend() == "cpu" else None,
    )
    return initialize()


def make_train_step(
    config: Config, axis_name: str | None = None, *, sum_gradients: bool = False
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """Returns the step of one device; see `train_step`."""
    return functools.partial(
        train_step,
        model=make_model(config, axis_name),
        optimizer=make_optimizer(config),
        prepare=functools.partial(_prepare, **augmentation(config)),
        seed=config.seed,
        axis_name=axis_name,
        sum_gradients=sum_gradients,
        accumulate=config.accumulate,
    )


def augmentation(config: Config) -> dict[str, Any]:
    """Returns what happens to the pictures of a data set; crops are the stream's."""
    if config.dataset.startswith("mnist"):
        return {"mirror": False, "crop_padding": 0, "photometric": "none"}
    padding = 4 if config.dataset == "cifar10" else 0
    return {
        "mirror": True,
        "crop_padding": padding,
        "photometric": config.photometric,
    }


def _prepare(keys: Array, images: Array, **options: Any) -> Array:
    return standardize(augment(keys, images, **options))


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    prepare: Callable[[Array, Array], Array],
    seed: int,
    axis_name: str | None,
    sum_gradients: bool,
    accumulate: int,
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after one update, and metrics; the same on all devices.

    Args:
      state: Replicated over the devices.
      batch: This device's rows of the global batch.
      model: Called with `train=True`; its statistics are shared over `axis_name`.
      optimizer: Updates the parameters.
      prepare: `(keys, images) -> images`, with a key for each row.
      seed: Of augmentation and dropout.
      axis_name: The mapped axis of the devices; None: the batch is global already.
      sum_gradients: True under pmap and unchecked shard_map, where the gradient of
        this device's part of the loss is taken and summed. False under shard_map
        with check_vma, where the gradient of the global loss arrives summed.
      accumulate: How many microbatches to take the batch in, one after the other. Each
        is normalized by itself.

    Returns:
      The state, and sums over the global batch: `loss`, `correct`, `count`, and the
      norm of the gradient, `grad_norm`.
    """
    prepare_key, dropout_key = jax.random.split(
        jax.random.fold_in(stream_key(seed, "noise"), state.step)
    )
    keys = row_keys(prepare_key, len(batch["label"]), axis_name)
    batch = {**batch, "image": prepare(keys, batch["image"])}

    def total(value: Any) -> Any:
        return value if axis_name is None else lax.psum(value, axis_name)

    # A batch may have no valid example left; then its gradient is 0.
    count = jnp.maximum(total(batch.get("mask", jnp.ones_like(keys, bool)).sum()), 1)

    def loss_fn(*args: Any) -> tuple[Array, tuple[Any, dict[str, Array]]]:
        sums, batch_stats = train_sums(*args, model=model)
        loss = sums["loss"] / count.astype(sums["loss"].dtype)
        loss = loss if sum_gradients else total(loss)
        return loss, (batch_stats, total(sums))

    gradient_of = functools.partial(jax.grad(loss_fn, has_aux=True), state.params)
    if accumulate == 1:
        found = gradient_of(state.batch_stats, batch, dropout_key)
    else:
        found = add_microbatches(gradient_of, state, batch, dropout_key, accumulate)
    gradients, (batch_stats, metrics) = found
    if sum_gradients:
        gradients = total(gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    new = TrainState(
        state.step + 1,
        optax.apply_updates(state.params, updates),
        batch_stats,
        opt_state,
        state.position + total(len(keys)),
    )
    return new, {**metrics, "grad_norm": optax.tree.norm(gradients)}


def train_sums(
    params: Any, batch_stats: Any, batch: Batch, dropout_key: Array, *, model: nn.Module
) -> tuple[dict[str, Array], Any]:
    """Returns the sums of `metrics_of` in training mode, and the new `batch_stats`."""
    logits, updates = model.apply(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        train=True,
        mask=batch.get("mask"),
        mutable=["batch_stats"],
        rngs={"dropout": dropout_key},
    )
    return metrics_of(logits, batch), updates.get("batch_stats", {})


def stream_key(seed: int, purpose: str) -> Array:
    """Returns the key of "init" or "noise", apart from the keys of the epochs."""
    purposes = {"init": 2**32 - 1, "noise": 2**32 - 2}
    number = jnp.asarray(purposes[purpose], jnp.uint32)
    return jax.random.fold_in(jax.random.key(seed), number)


def row_keys(key: Array, count: int, axis_name: str | None) -> Array:
    """Returns a key for each of this device's rows, by its place in the global batch.

    So what happens to a row does not depend on the number of devices.
    """
    rows = jnp.arange(count)
    if axis_name is not None:
        rows = lax.axis_index(axis_name) * count + rows
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def eval_step(state: TrainState, batch: Batch, *, model: nn.Module) -> dict[str, Array]:
    """Returns sums over the unmasked examples, to be added up over batches."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = model.apply(variables, standardize(batch["image"]), train=False)
    assert isinstance(logits, Array)
    top5 = lax.top_k(logits, min(5, logits.shape[-1]))[1]
    in_top5 = (top5 == batch["label"][:, None]).any(-1)
    valid = batch["mask"]
    return {**metrics_of(logits, batch), "correct_top5": (in_top5 & valid).sum()}


def metrics_of(logits: Array, batch: Batch) -> dict[str, Array]:
    """Returns sums over the rows that count: `loss`, `correct`, `count`.

    Args:
      logits: `(N, K)`.
      batch: Its `mask`, where there is one, is False for rows that do not count.
    """
    labels = batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(compute_dtype(logits.dtype)), labels
    )
    correct = logits.argmax(-1).astype(labels.dtype) == labels
    mask = batch.get("mask")
    mask = jnp.ones_like(correct) if mask is None else mask
    return {
        "loss": jnp.where(mask, losses, jnp.zeros_like(losses)).sum(),
        "correct": (correct & mask).sum(),
        "count": mask.sum(),
    }
