"""One training run as data, and the named runs of the paper."""

import dataclasses
import math
from typing import Any, Literal

import jax

IMAGENET_BATCHES = 1_281_167 / 32  # in an epoch, at the paper's batch size

POSITIVE = ("batch_size", "accumulate", "num_steps", "width", "decay_rate")
POSITIVE += ("decay_steps", "image_size", "log_every", "eval_every")
POSITIVE += ("checkpoint_every", "keep")
NOT_NEGATIVE = ("learning_rate", "weight_decay", "num_workers", "max_corrupt", "seed")
INCEPTION_FIELDS = ("dropout_rate", "local_response_norm", "width")


class RunError(ValueError):
    """What the user has to mend; the message is one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. Durations are in steps, sizes in examples."""

    model: Literal["inception", "mlp"] = "inception"
    """The paper's network, or the three sigmoid layers of Section 4.1."""
    batch_norm: bool = True
    """Normalize the input of every nonlinearity."""
    activation: Literal["relu", "sigmoid"] = "relu"
    """The nonlinearity."""
    dropout_rate: float = 0.0
    """Fraction of the features before the classifier to drop in training."""
    local_response_norm: bool = False
    """GoogLeNet's two layers of local response normalization."""
    width: float = 1.0
    """Multiplies the channels of every layer of inception."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of activations; parameters and the loss are float32 or wider. float64 takes
    JAX_ENABLE_X64=1, and shows what of a difference between runs is rounding."""
    bn_momentum: float = 0.9
    """Weight of the old running value in batch_stats."""

    dataset: str = "imagenet2012"
    """imagenet2012, cifar10, mnist, or mnist_subset (comes with the program)."""
    data_dir: str | None = None
    """Folder of TensorFlow Datasets; None: its default."""
    image_size: int = 224
    """Side of the crops of imagenet2012."""
    photometric: Literal["none", "weak", "full"] = "weak"
    """Strength of the distortions of brightness, contrast and colour; grey digits are
    left as they are."""
    num_workers: int = 0
    """Processes that decode imagenet2012, beside the threads of this one."""
    max_corrupt: int = 100
    """Unreadable pictures that training leaves out; evaluation leaves out none."""

    batch_size: int = 32
    """Global: the sum over all devices."""
    accumulate: int = 1
    """Microbatches that a step takes its batch in, one after the other, to fit into
    memory. Each is normalized by itself; the running values move once a step."""
    num_steps: int = 2_100_000
    """Updates of the parameters."""
    learning_rate: float = 0.0015
    """At step 0."""
    decay_rate: float = 0.96
    """The learning rate is multiplied by this every decay_steps."""
    decay_steps: int = round(8 * IMAGENET_BATCHES)
    """GoogLeNet's: 8 epochs of ImageNet."""
    sgd_momentum: float = 0.9
    """Of the gradient."""
    weight_decay: float = 2e-4
    """L2 penalty on kernels; scales and biases have none."""
    seed: int = 0
    """Of parameters, order of examples, augmentation and dropout."""

    log_every: int = 100
    """Steps between reports of the training loss."""
    eval_every: int = 5_000
    """Steps between evaluations; there is one at the end as well."""
    checkpoint_every: int = 5_000
    """Steps between checkpoints; there is one at the end as well."""
    keep: int = 3
    """Newest checkpoints to keep; the best one stays too."""
    parallel: Literal["shard_map", "pmap"] = "shard_map"
    """How a step is spread over the devices; the numbers are the same."""

    def __post_init__(self) -> None:
        """Raises on a value that no run can have."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            finite = not isinstance(value, float) or math.isfinite(value)
            self._check(field.name, finite, "finite")
        for name in POSITIVE:
            self._check(name, getattr(self, name) > 0, "more than 0")
        for name in NOT_NEGATIVE:
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("bn_momentum", "sgd_momentum"):
            self._check(name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
        self._check("dropout_rate", 0 <= self.dropout_rate < 1, "in [0, 1)")
        self._check("seed", self.seed < 2**31, "less than 2³¹")
        self._check_together()

    def _check_together(self) -> None:
        """Raises on values that do not go with one another, or here."""
        even = self.batch_size % self.accumulate == 0
        self._check("accumulate", even, f"a divisor of batch_size={self.batch_size}")
        few = self.batch_size * self.num_steps < 2**31
        allowed = "so small that fewer than 2³¹ examples are drawn"
        self._check("num_steps", few, allowed)
        known = jax.dtypes.canonicalize_dtype(self.dtype) == self.dtype
        self._check("dtype", known, "used with JAX_ENABLE_X64=1 in the environment")
        if self.model == "mlp":
            lone = self.batch_norm and self.batch_size // self.accumulate < 2
            least = f"at least {2 * self.accumulate} with batch normalization"
            self._check("batch_size", not lone, least)
            for name in INCEPTION_FIELDS:
                default = type(self).__dataclass_fields__[name].default
                untouched = getattr(self, name) == default
                self._check(name, untouched, "left alone: only inception has it")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise RunError(f"{name}={getattr(self, name)} must be {allowed}.")


def from_dict(values: dict[str, Any]) -> Config:
    """Returns the config of a saved run; an unknown field is an error."""
    names = [field.name for field in dataclasses.fields(Config)]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise RunError(f"A run has no fields {unknown}. Fields: {', '.join(names)}.")
    return Config(**values)


# Section 4.1: three hidden layers of 100 sigmoids, batches of 60, 50 000 steps.
MNIST_SIGMOID_BN = Config(
    model="mlp",
    activation="sigmoid",
    dataset="mnist_subset",
    photometric="none",
    batch_size=60,
    num_steps=50_000,
    learning_rate=0.1,
    decay_rate=1.0,
    sgd_momentum=0.0,
    weight_decay=0.0,
    bn_momentum=0.99,
)

# Section 4.2.2, "Inception": Figure 2's baseline; 72.2 % after 31.0 M steps.
INCEPTION = Config(
    batch_norm=False,
    dropout_rate=0.4,
    local_response_norm=True,
    photometric="full",
    num_steps=31_000_000,
)

# Section 4.2.2, "BN-x5": batch normalization with Section 4.2.1's list of changes:
# no dropout, L2 divided by 5, decay 6 times faster, no local response normalization,
# weaker photometric distortions. 72.2 % after 2.1 M steps, 73.0 % at best.
BN_X5 = Config(
    learning_rate=5 * INCEPTION.learning_rate,
    weight_decay=INCEPTION.weight_decay / 5,
    decay_steps=INCEPTION.decay_steps // 6,
)

RUNS = {
    # The network of Section 4.1 without and with batch normalization (Figure 1).
    "mnist_sigmoid": dataclasses.replace(MNIST_SIGMOID_BN, batch_norm=False),
    "mnist_sigmoid_bn": MNIST_SIGMOID_BN,
    "inception": INCEPTION,
    # "BN-Baseline": only batch normalization is added; 72.7 %, 13.3 M steps to 72.2 %.
    "bn_baseline": dataclasses.replace(
        INCEPTION, batch_norm=True, num_steps=13_300_000
    ),
    "bn_x5": BN_X5,
    # "BN-x30": 74.8 % after 6 M steps.
    "bn_x30": dataclasses.replace(
        BN_X5, learning_rate=30 * INCEPTION.learning_rate, num_steps=6_000_000
    ),
    # "BN-x5-Sigmoid": 69.8 %.
    "bn_x5_sigmoid": dataclasses.replace(BN_X5, activation="sigmoid"),
    # The baseline at BN-x5's rate: "parameters reach machine infinity".
    "inception_x5": dataclasses.replace(
        INCEPTION, learning_rate=5 * INCEPTION.learning_rate
    ),
    # The baseline with sigmoids: stays at chance, 0.1 %.
    "inception_sigmoid": dataclasses.replace(INCEPTION, activation="sigmoid"),
}
