"""The Inception network of Section 4.2, laid out as in Figure 5."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from bnjax.linen import BatchNorm
from bnjax.models.layers import (
    ExampleDropout,
    average_pool,
    local_response_norm,
    max_pool,
    normalize_activations,
    zero_masked,
)

# Keeps the variance of what passes through convolution and ReLU, on which the network
# without BN depends. With BN the scale of the weights leaves the output as it is and
# divides the gradient (Section 3.3), so the baseline may choose.
HE_INIT = nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")


# Padding of Caffe's pools, which round sizes up: one more window, half over the end.
CEIL = ((0, 1), (0, 1))


class Row(NamedTuple):
    """Output channels in one Inception module: one row of Figure 5."""

    conv: int  # 1×1; 0: stride 2, so this branch is absent and the pool unprojected
    reduce: int  # 1×1 before the 3×3
    conv3: int  # 3×3
    double_reduce: int  # 1×1 before the two 3×3
    double: int  # both of the two 3×3 that replace GoogLeNet's 5×5
    pool: str
    pool_proj: int  # 1×1 behind the pool


MODULES = {
    "inception_3a": Row(64, 64, 64, 64, 96, "average", 32),
    "inception_3b": Row(64, 64, 96, 64, 96, "average", 64),
    "inception_3c": Row(0, 128, 160, 64, 96, "max", 0),
    "inception_4a": Row(224, 64, 96, 96, 128, "average", 128),
    "inception_4b": Row(192, 96, 128, 96, 128, "average", 128),
    "inception_4c": Row(160, 128, 160, 128, 160, "average", 128),
    "inception_4d": Row(96, 128, 192, 160, 192, "average", 128),
    "inception_4e": Row(0, 128, 192, 192, 256, "max", 0),
    "inception_5a": Row(352, 192, 320, 160, 224, "average", 128),
    "inception_5b": Row(352, 192, 320, 192, 224, "max", 128),
}


def conv_unit(
    x: jax.Array,
    channels: int,
    kernel_size: int,
    *,
    name: str,
    stride: int = 1,
    width: float,
    norm: Callable[..., nn.Module] | None,
    activation: Callable[[jax.Array], jax.Array],
    kernel_init: nn.initializers.Initializer,
    dtype: Any,
    train: bool,
    mask: jax.Array | None,
) -> jax.Array:
    """Returns activation(BN(W ∗ x)), the unit of Section 3.2, for an odd kernel size.

    Makes the submodules `name` and, with `norm`, `name_bn` of the module that calls.
    """
    layer = nn.Dense  # a 1×1 convolution; CPUs are faster at the matrix product
    if kernel_size > 1:
        # Not "SAME", which pads an even size at its end only when the stride is 2.
        layer = functools.partial(
            nn.Conv,
            kernel_size=(kernel_size, kernel_size),
            strides=stride,
            padding=kernel_size // 2,
        )
    x = layer(
        features=max(1, round(width * channels)),
        # BN subtracts the mean, and any bias with it (Section 3.2).
        use_bias=norm is None,
        kernel_init=kernel_init,
        dtype=dtype,
        name=name,
    )(x)
    if norm is not None:
        x = normalize_activations(
            x, norm, name=f"{name}_bn", train=train, dtype=dtype, mask=mask
        )
    return activation(x)


class InceptionModule(nn.Module):
    """One module of Figure 5: up to four branches, side by side in the channels.

    Attributes:
      row: Channels of each branch at width 1. The other attributes are `Inception`'s.
    """

    row: Row
    width: float
    norm: Callable[..., nn.Module] | None
    activation: Callable[[jax.Array], jax.Array]
    kernel_init: nn.initializers.Initializer
    dtype: Any

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns `(N, H, W, C')`, or `(N, ⌈H/2⌉, ⌈W/2⌉, C')` where the pool passes.

        Args:
          x: `(N, H, W, C)`; real floating dtype.
          train: Static. As for `Inception`.
          mask: `(N,)`. As for `Inception`.
        """
        row = self.row
        unit = functools.partial(
            conv_unit, **unit_options(self), train=train, mask=mask
        )
        stride = 1 if row.conv else 2
        conv3 = unit(x, row.reduce, 1, name="3x3_reduce")
        conv3 = unit(conv3, row.conv3, 3, name="3x3", stride=stride)
        double = unit(x, row.double_reduce, 1, name="double_3x3_reduce")
        double = unit(double, row.double, 3, name="double_3x3_1")
        double = unit(double, row.double, 3, name="double_3x3_2", stride=stride)
        pooled = (
            average_pool(x) if row.pool == "average" else _branch_max_pool(x, stride)
        )
        if not row.conv:
            return jnp.concatenate([conv3, double, pooled], axis=-1)
        conv = unit(x, row.conv, 1, name="1x1")
        pooled = unit(pooled, row.pool_proj, 1, name="pool_proj")
        return jnp.concatenate([conv, conv3, double, pooled], axis=-1)


def _branch_max_pool(x: jax.Array, stride: int) -> jax.Array:
    """Returns the maxima of 3×3 windows, as many as a 3×3 convolution has outputs."""
    if stride == 1:
        return max_pool(x, 1, ((1, 1), (1, 1)))
    # Even sizes as in CEIL. Odd ones, where the ports fail to concatenate, centre the
    # windows where the convolutions do.
    return max_pool(x, 2, ((x.shape[1] % 2, 1), (x.shape[2] % 2, 1)))


def unit_options(module: "Inception | InceptionModule") -> dict[str, Any]:
    """Returns the attributes of `module` that all of its `conv_unit`s share."""
    names = ("width", "norm", "activation", "kernel_init", "dtype")
    return {name: getattr(module, name) for name in names}


def imagenet_stem(x: jax.Array, unit: Callable, lrn: Callable) -> jax.Array:
    """Returns `(N, H/8, W/8, 192)`; `lrn` is GoogLeNet's normalization or nothing."""
    x = unit(x, 64, 7, name="conv1_7x7_s2", stride=2)
    x = lrn(max_pool(x, 2, CEIL))
    x = unit(x, 64, 1, name="conv2_3x3_reduce")
    x = lrn(unit(x, 192, 3, name="conv2_3x3"))
    return max_pool(x, 2, CEIL)


def small_stem(x: jax.Array, unit: Callable, lrn: Callable) -> jax.Array:
    """Returns `(N, ⌈H/2⌉, ⌈W/2⌉, 192)`: the modules need not start at 3 or 4 pixels."""
    return lrn(unit(x, 192, 3, name="conv1_3x3_s2", stride=2))


STEMS = {"imagenet": imagenet_stem, "small": small_stem}


class Inception(nn.Module):
    """Inception with BN before every nonlinearity (Section 4.2), or without BN.

    GoogLeNet with two 3×3 convolutions for each 5×5, for images of 224×224; paddings,
    pools and layer names are those of the published Caffe and PyTorch ports. With BN
    and 1000 classes it has 69 convolutions and 11 285 224 parameters. The paper's
    text says 13.6 million, to which the table of its Figure 5 does not add up; its
    first layer, a separable convolution of depth multiplier 8, is a plain one here.

    Attributes:
      num_classes: Units of the output layer.
      norm: Constructor with the arguments of `bnjax.linen.BatchNorm`, such as
        `functools.partial(BatchNorm, axis_name="batch")`. None: the baseline, whose
        convolutions have biases instead.
      activation: Nonlinearity behind every convolution.
      dropout_rate: Probability in [0, 1) that an input of the output layer becomes 0;
        GoogLeNet's is 0.4. Above 0, training needs a "dropout" key.
      local_response_norm: Whether the stem normalizes as GoogLeNet's does.
      stem: "imagenet", which divides H and W by 8, or "small", one convolution that
        divides them by 2, for images of 28×28 to 64×64. The modules divide by 4 more.
      width: Factor > 0 on the channels of every layer, which keep 1 at least.
      axis_name: Mapped axis (or tuple of axes) that the batch is split over, for
        dropout alone; `norm` brings its own.
      kernel_init: Initializer of the convolutions' weights.
      dtype: Dtype of the computation and of the logits. None: as input and parameters.

    >>> model = Inception(stem="small", num_classes=10, width=0.125)
    >>> init = functools.partial(model.init_with_output, train=False)
    >>> images = jnp.zeros((2, 28, 28, 1))
    >>> logits, variables = jax.eval_shape(init, jax.random.key(0), images)
    >>> logits.shape, sorted(variables)
    ((2, 10), ['batch_stats', 'params'])
    """

    num_classes: int = 1000
    norm: Callable[..., nn.Module] | None = BatchNorm
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dropout_rate: float = 0.0
    local_response_norm: bool = False
    stem: str = "imagenet"
    width: float = 1.0
    axis_name: str | tuple[str, ...] | None = None
    kernel_init: nn.initializers.Initializer = HE_INIT
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits `(N, num_classes)`.

        Args:
          x: `(N, H, W, channels)`; real floating dtype.
          train: Static. True: BN takes statistics of the batch and updates the running
            ones, and dropout draws. False: running statistics, no dropout.
          mask: `(N,)`, True where an example counts in BN's statistics. None: all.

        Raises:
          ValueError: `stem`, `width`, `dropout_rate` or the rank of `x` is not allowed.
        """
        self._check(x)
        x = zero_masked(x, mask)
        options = unit_options(self)
        unit = functools.partial(conv_unit, **options, train=train, mask=mask)
        lrn = local_response_norm if self.local_response_norm else lambda x: x
        x = STEMS[self.stem](x, unit, lrn)
        for name, row in MODULES.items():
            x = InceptionModule(row, **options, name=name)(x, train=train, mask=mask)
        x = x.mean((1, 2))  # 7×7 at 224×224
        x = ExampleDropout(self.dropout_rate, self.axis_name)(x, train=train)
        # From zero: the network starts at chance with small gradients. From random
        # weights BN-x5 starts so steep that a change of 1e-7 grows tenfold a step.
        return nn.Dense(
            self.num_classes,
            kernel_init=nn.initializers.zeros,
            dtype=self.dtype,
            name="last_linear",
        )(x)

    def _check(self, x: jax.Array) -> None:
        """Raises ValueError for what the network cannot be built from."""
        if self.stem not in STEMS:
            allowed = ", ".join(map(repr, STEMS))
            raise ValueError(f"stem={self.stem!r} is unknown. Allowed: {allowed}.")
        if not self.width > 0:
            raise ValueError(f"width={self.width} must be greater than 0.")
        if x.ndim != 4:
            raise ValueError(
                f"x has shape {x.shape}, but images are (N, H, W, channels): "
                "add the axis that is missing, also for a single image or channel."
            )
