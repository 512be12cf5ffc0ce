"""The networks of the paper and of the studies."""

from bnjax.models.inception import Inception as Inception
from bnjax.models.mlp import MLP as MLP
