"""Batches of arrays of different sizes, and functions of one array mapped over them."""

from .array import RaggedArray as RaggedArray
from .associative import associative_scan as associative_scan
from .capacity import round_capacity as round_capacity
from .capacity import round_length as round_length
from .context import Context as Context
from .convolve import convolve as convolve
from .convolve import correlate as correlate
from .example import Sizes as Sizes
from .layouts import Flat as Flat
from .layouts import Padded as Padded
from .layouts import Shared as Shared
from .padded import PaddedRagged as PaddedRagged
from .registry import Refuse as Refuse
from .registry import register as register
from .segments import Segments as Segments
from .segments import Tail as Tail
from .tiers import length_tiers as length_tiers
from .vmap import vmap as vmap
