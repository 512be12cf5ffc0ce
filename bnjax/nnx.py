"""Batch Normalization for Flax NNX."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array
from jax.nn import initializers

from bnjax.layer import call_layer, counts_calls, result_dtype, stored_batch_stats
from bnjax.statistics import Moments, update_batch_stats
from bnjax.transform import Renorm


class BatchNorm(nnx.Module):
    """Batch Normalization; takes the place of `flax.nnx.BatchNorm`.

    Attributes and their types are Flax's: `scale` and `bias` (γ, β) are `nnx.Param`,
    `mean` and `var` are `nnx.BatchStat`, `(C,)` each. What differs from Flax on purpose
    is in `bnjax.linen.BatchNorm`, with which this module agrees bit for bit.

    >>> layer = BatchNorm(1, momentum=0.75, epsilon=0.0, rngs=nnx.Rngs(0))
    >>> layer(jnp.array([[1.0], [3.0]])).tolist(), layer.mean[...].tolist()
    ([[-1.0], [1.0]], [0.5])
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float | None = 0.99,
        epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: initializers.Initializer = initializers.zeros,
        scale_init: initializers.Initializer = initializers.ones,
        axis_name: str | tuple[str, ...] | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: Any = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        update_stats: bool = True,
        unbiased: bool = True,
        virtual_batch_size: int | None = None,
        renorm: Renorm | None = None,
        debias: bool = False,
    ) -> None:
        """Makes the parameters and running values.

        Args:
          num_features: C.
          use_running_average: Normalize with the running values, not with the batch.
            `eval()` and `train()` set it.
          axis: The feature axis of the input.
          momentum: Weight of the old running value, in [0, 1]. None: the plain average
            over all calls, whose number is kept in `count`.
          epsilon: ε, added to the variance under the root.
          dtype: Of the result. None: what input, parameters and running values promote
            to.
          param_dtype: Of scale and bias.
          use_bias: Learn β.
          use_scale: Learn γ.
          bias_init: Initializer of β.
          scale_init: Initializer of γ.
          axis_name: Mapped axis or axes whose devices share statistics in training. It
            need not be bound in evaluation.
          axis_index_groups: Groups of device indices that share among themselves.
          use_fast_variance: False always takes a second pass (and all-reduce) over the
            input; True does so only while the running mean is far from the data.
          promote_dtype: Decides the dtype of the result, as in Flax. Statistics and
            arithmetic stay in float32 or wider.
          rngs: Of the initializers.
          bias_metadata: Of the variable of β.
          scale_metadata: Of the variable of γ.
          update_stats: Move the running values in training.
          unbiased: Move the running variance by m/(m−1) times the batch's.
          virtual_batch_size: See `bnjax.linen.BatchNorm`.
          renorm: Batch Renormalization in training (Ioffe 2017).
          debias: See `bnjax.linen.BatchNorm`.
        """
        features = (num_features,)
        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype
        self.update_stats = update_stats
        self.unbiased = unbiased
        self.virtual_batch_size = virtual_batch_size
        self.renorm = renorm
        self.debias = debias
        self.mean = nnx.BatchStat(jnp.zeros(features, jnp.float32))
        start = jnp.zeros if debias else jnp.ones
        self.var = nnx.BatchStat(start(features, jnp.float32))
        if counts_calls(self):
            self.count = nnx.BatchStat(jnp.zeros(features, jnp.float32))

        def parameter(used: bool, init: Any, metadata: Mapping[str, Any]) -> Any:
            if not used:
                return nnx.data(None)
            return nnx.Param(init(rngs.params(), features, param_dtype), **metadata)

        self.scale = parameter(use_scale, scale_init, scale_metadata)
        self.bias = parameter(use_bias, bias_init, bias_metadata)

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        scale: Array | None = None,
        bias: Array | None = None,
        renorm: Renorm | None = None,
    ) -> Array:
        """Returns the normalized input; in training the running values move.

        Args:
          x: `(N, ..., C)`, or with its features in `axis`.
          use_running_average: Takes precedence over the module's.
          mask: True where an element counts; of the rank of `x`, or aligned with its
            leading axes: `(N,)` for examples, `(N, H, W)` for positions.
          scale: γ in place of the module's own: `(C,)`, `(N, C)` for each example, or
            of the rank of `x`.
          bias: β, likewise.
          renorm: In place of the module's; a schedule may be traced.

        Returns:
          The shape of `x`, in `dtype`; 0 where masked out.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average is None:
            raise ValueError(
                "BatchNorm does not know whether it trains. Pass use_running_average "
                "to its constructor or to the call, or call train() or eval() of the "
                "model."
            )
        if scale is None and self.scale is not None:
            scale = self.scale[...]
        if bias is None and self.bias is not None:
            bias = self.bias[...]
        stats = self._running_values()
        values = {name: variable[...] for name, variable in stats.items()}
        with jax.numpy_dtype_promotion("standard"):
            x_like, _, _, *parameters = jax.eval_shape(
                lambda *arrays: self.promote_dtype(arrays, dtype=self.dtype),
                *(x, values["mean"], values["var"], scale, bias),
            )
        y, moments = call_layer(
            self,
            x,
            stored_batch_stats(self, values),
            scale=scale,
            bias=bias,
            use_running_average=use_running_average,
            mask=mask,
            renorm=self.renorm if renorm is None else renorm,
            dtype=result_dtype(self.dtype, x_like, *parameters),
            # Not an error as in Linen, which knows when it is initializing: modules
            # here are tried out on a batch of one.
            single="warning",
        )
        if moments is not None and self.update_stats:
            self._move(moments)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets what `nnx.view` changes in a view of the module.

        Args:
          use_running_average: Normalize with the running values, not with the batch.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def _running_values(self) -> dict[str, nnx.BatchStat]:
        stats = {"mean": self.mean, "var": self.var}
        return {**stats, "count": self.count} if counts_calls(self) else stats

    def _move(self, moments: Moments) -> None:
        """Moves the running values towards a batch."""
        stats = self._running_values()
        values = {name: variable[...] for name, variable in stats.items()}
        new = update_batch_stats(
            stored_batch_stats(self, values),
            moments,
            momentum=self.momentum,
            unbiased=self.unbiased,
        )
        for name, variable in stats.items():
            value = getattr(new, name)
            if value.dtype == values[name].dtype:
                variable[...] = value
            else:  # the mean of complex input is complex
                variable.set_value(value)
