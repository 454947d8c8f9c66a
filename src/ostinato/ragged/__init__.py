"""Batches of arrays of different sizes, and functions of one array mapped over them."""

from . import _serialization as _serialization
from .batches import concatenate as concatenate
from .batches import stack as stack
from .core.context import Context as Context
from .core.example_sizes import Sizes as Sizes
from .core.registry import Unsupported as Unsupported
from .core.values import Flat as Flat
from .core.values import Padded as Padded
from .core.values import Shared as Shared
from .gradients import grad as grad
from .gradients import value_and_grad as value_and_grad
from .primitives.associative_scan import associative_scan as associative_scan
from .primitives.convolve import convolve as convolve
from .primitives.convolve import correlate as correlate
from .registration import register as register
from .schedule.tiers import length_tiers as length_tiers
from .sharding import shard as shard
from .types.array import RaggedArray as RaggedArray
from .types.capacity import round_capacity as round_capacity
from .types.capacity import round_length as round_length
from .types.padded import PaddedRagged as PaddedRagged
from .types.segments import Segments as Segments
from .types.segments import UsedCapacity as UsedCapacity
from .types.sharded import ShardedBatch as ShardedBatch
from .types.sharded import ShardedRagged as ShardedRagged
from .vmap import vmap as vmap
