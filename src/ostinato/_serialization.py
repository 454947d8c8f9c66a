"""Registration of the named tuples that `jax.export` must be able to serialize."""

from __future__ import annotations

from jax import export

from ._linear.api import LinearOutput
from ._linear.returns import GAEOutput
from ._recurrent.protocol import RecurrentOutput
from ._rnn import cell_passes
from ._rnn.cell import LayerWeights
from ._rnn.output import RNNOutput
from ._rnn.passes import RNNGrads
from ._rnn.prepared import PreparedWeights

for kind in (
    RNNOutput,
    RNNGrads,
    LayerWeights,
    PreparedWeights,
    cell_passes.GRUReserve,
    cell_passes.GRUCellGrads,
    cell_passes.LSTMReserve,
    cell_passes.LSTMCellGrads,
    cell_passes.RNNCellReserve,
    cell_passes.RNNCellGrads,
    RecurrentOutput,
    LinearOutput,
    GAEOutput,
):
    export.register_namedtuple_serialization(
        kind, serialized_name=f"ostinato.{kind.__name__}"
    )
