"""Batches of sequences for training: in buckets, as long streams, or without padding.

`buckets`, `streams` and `pack` decide which sequences or steps come in which batch, in
numpy alone. The order of every epoch follows from a seed, and the place within an epoch
can be saved and restored.
"""

from .buckets import Buckets as Buckets
from .buckets import bucket_bounds as bucket_bounds
from .buckets import buckets as buckets
from .epochs import Epochs as Epochs
from .packs import Packs as Packs
from .packs import pack as pack
from .streams import Streams as Streams
from .streams import streams as streams
