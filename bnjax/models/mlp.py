"""The fully connected network of Section 4.1."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn

from bnjax.models.layers import normalize_activations, zero_masked


class MLP(nn.Module):
    """Fully connected layers, with or without BN before each nonlinearity.

    The defaults are Section 4.1's baseline: three hidden layers of 100 sigmoid units
    and a 10-way output, weights "small random Gaussian". With
    `norm=bnjax.linen.BatchNorm` it is the paper's batch-normalized network.

    What enters the nonlinearity of each hidden layer is sown as `preactivation` into
    the collection `intermediates`, a tuple from the first hidden layer to the last:
    Figure 1(b, c) follows one unit of the last.

    Attributes:
      features: Units of each hidden layer.
      num_classes: Units of the output layer.
      norm: Constructor with the arguments of `bnjax.linen.BatchNorm`, such as
        `functools.partial(BatchNorm, momentum=0.9)`. None: no normalization.
      activation: Nonlinearity, element by element.
      kernel_init: Initializer of the weight matrices.
      dtype: Dtype of the computation. None: as input and parameters.

    >>> model = MLP()
    >>> images = jax.numpy.ones((2, 28, 28))
    >>> variables = model.init(jax.random.key(0), images, train=False)
    >>> jax.tree.map(jax.numpy.shape, variables["params"]["hidden_1"])
    {'bias': (100,), 'kernel': (784, 100)}
    """

    features: Sequence[int] = (100, 100, 100)
    num_classes: int = 10
    norm: Callable[..., nn.Module] | None = None
    activation: Callable[[jax.Array], jax.Array] = nn.sigmoid
    kernel_init: nn.initializers.Initializer = nn.initializers.normal(0.05)
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, mask: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits `(N, num_classes)`.

        Args:
          x: `(N, ...)`, flattened to `(N, D)`; floating dtype.
          train: Static. True: BN takes statistics of the batch and updates the running
            ones. False: it uses the running ones.
          mask: `(N,)`, True where an example counts in BN's statistics. None: all.
        """
        x = zero_masked(x.reshape(len(x), -1), mask)
        for layer, features in enumerate(self.features, start=1):
            name = f"hidden_{layer}"
            # BN subtracts the mean, and any bias with it (Section 3.2).
            use_bias = self.norm is None
            x = self._dense(features, name, use_bias=use_bias)(x)
            if self.norm is not None:
                x = normalize_activations(
                    x,
                    self.norm,
                    name=f"{name}_bn",
                    train=train,
                    dtype=self.dtype,
                    mask=mask,
                )
            self.sow("intermediates", "preactivation", x)
            x = self.activation(x)
        return self._dense(self.num_classes, "output")(x)

    def _dense(self, features: int, name: str, use_bias: bool = True) -> nn.Dense:
        """Returns a new dense layer with this network's initializer and dtype."""
        return nn.Dense(
            features,
            use_bias=use_bias,
            kernel_init=self.kernel_init,
            dtype=self.dtype,
            name=name,
        )
