"""Recurrent networks that are first-class on JAX.

Write the model for one sequence; ostinato runs it for a batch of sequences of different
lengths, and differentiates it any number of times. Begin with `RNNSpec`, `init_weights`
and `rnn`.
"""

from . import interrupts as interrupts  # isort: skip, before imports that take long
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import _serialization as _serialization
from . import cells as cells
from . import data as data
from . import ragged as ragged
from ._config import ConfigError as ConfigError
from ._linear.api import LinearOutput as LinearOutput
from ._linear.api import linear_recurrence as linear_recurrence
from ._linear.devices import (
    linear_recurrence_over_devices as linear_recurrence_over_devices,
)
from ._linear.filters import lfilter as lfilter
from ._linear.filters import sosfilt as sosfilt
from ._linear.returns import GAEOutput as GAEOutput
from ._linear.returns import discounted_returns as discounted_returns
from ._linear.returns import gae as gae
from ._linear.returns import lambda_returns as lambda_returns
from ._modules import advising as _advising
from ._recurrent.net import recurrent_net as recurrent_net
from ._recurrent.protocol import RecurrentOutput as RecurrentOutput
from ._recurrent.remat import tag as tag
from ._recurrent.truncated import tbptt as tbptt
from ._rnn.api import rnn as rnn
from ._rnn.api import rnn_step as rnn_step
from ._rnn.backend import BackendStatus as BackendStatus
from ._rnn.backends import BackendError as BackendError
from ._rnn.backends import Explanation as Explanation
from ._rnn.backends import backends as backends
from ._rnn.cell import LayerWeights as LayerWeights
from ._rnn.cell_passes import GRUCellGrads as GRUCellGrads
from ._rnn.cell_passes import GRUReserve as GRUReserve
from ._rnn.cell_passes import LSTMCellGrads as LSTMCellGrads
from ._rnn.cell_passes import LSTMReserve as LSTMReserve
from ._rnn.cell_passes import RNNCellGrads as RNNCellGrads
from ._rnn.cell_passes import RNNCellReserve as RNNCellReserve
from ._rnn.cell_passes import gru_cell_backward as gru_cell_backward
from ._rnn.cell_passes import gru_cell_forward as gru_cell_forward
from ._rnn.cell_passes import gru_cell_inference as gru_cell_inference
from ._rnn.cell_passes import lstm_cell_backward as lstm_cell_backward
from ._rnn.cell_passes import lstm_cell_forward as lstm_cell_forward
from ._rnn.cell_passes import lstm_cell_inference as lstm_cell_inference
from ._rnn.cell_passes import rnn_cell_backward as rnn_cell_backward
from ._rnn.cell_passes import rnn_cell_forward as rnn_cell_forward
from ._rnn.cell_passes import rnn_cell_inference as rnn_cell_inference
from ._rnn.init import init_weights as init_weights
from ._rnn.layout import num_params as num_params
from ._rnn.layout import pack_weights as pack_weights
from ._rnn.layout import param_shapes as param_shapes
from ._rnn.layout import unpack_weights as unpack_weights
from ._rnn.output import RNNOutput as RNNOutput
from ._rnn.passes import RNNGrads as RNNGrads
from ._rnn.passes import RNNReserve as RNNReserve
from ._rnn.passes import rnn_backward as rnn_backward
from ._rnn.passes import rnn_forward as rnn_forward
from ._rnn.prepared import PreparedWeights as PreparedWeights
from ._rnn.prepared import prepare as prepare
from ._rnn.spec import RNNSpec as RNNSpec
from ._rnn.streaming import Stream as Stream
from .cells.explain_any import explain as explain
from .cells.sessions import StepStream as StepStream
from .cells.streaming import stream as stream
from .store import Saved as Saved
from .store import load as load
from .store import save as save

__version__ = "0.1.0"

if not _TYPE_CHECKING:  # to type checkers, it would make any name one of the package
    __getattr__ = _advising(
        __name__,
        {
            "nn": "from ostinato.nn.flax import LSTM, or from another module of it",
            "interop": "import ostinato.interop.torch, or another module of it",
        },
    )
