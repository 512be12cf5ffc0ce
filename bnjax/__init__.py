"""Batch Normalization (Ioffe & Szegedy 2015) for JAX: exact over devices and masks.

The functional core. The Flax modules are in `bnjax.linen`, the networks in
`bnjax.models`; importing this package does not import Flax.
"""

from bnjax.functional import batch_norm as batch_norm
from bnjax.functional import inference_affine as inference_affine
from bnjax.functional import normalize as normalize
from bnjax.optimizer import check_optimizer_tree as check_optimizer_tree
from bnjax.optimizer import weight_decay_mask as weight_decay_mask
from bnjax.pooling import finish_pooling as finish_pooling
from bnjax.pooling import start_pooling as start_pooling
from bnjax.statistics import BatchStats as BatchStats
from bnjax.statistics import CountedBatchStats as CountedBatchStats
from bnjax.statistics import Moments as Moments
from bnjax.statistics import batch_moments as batch_moments
from bnjax.statistics import init_batch_stats as init_batch_stats
from bnjax.statistics import merge_moments as merge_moments
from bnjax.statistics import update_batch_stats as update_batch_stats
from bnjax.transform import Renorm as Renorm
