"""Registration of the named tuples that `jax.export` must be able to serialize."""

from __future__ import annotations

from jax import export

from ._recurrent.protocol import RecurrentOutput
from ._rnn.cell import LayerWeights
from ._rnn.output import RNNOutput
from ._rnn.passes import RNNGrads
from ._rnn.prepared import PreparedWeights

for kind in (RNNOutput, RNNGrads, LayerWeights, PreparedWeights, RecurrentOutput):
    export.register_namedtuple_serialization(
        kind, serialized_name=f"ostinato.{kind.__name__}"
    )
