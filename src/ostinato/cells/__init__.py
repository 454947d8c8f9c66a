"""Cells and wrappers: step functions for `recurrent_net` that have parameters.

A cell is a frozen dataclass. `cell.init(key)` draws its parameters, a NamedTuple, and
`cell.initial_state(batch)` makes its states:

    >>> import jax, jax.numpy as jnp
    >>> import ostinato as ost
    >>> cell = ost.cells.LSTM(3, 4)
    >>> params = cell.init(jax.random.key(0))
    >>> x = jnp.ones((2, 5, 3))
    >>> out = ost.recurrent_net(cell, x, cell.initial_state(2), params=params)
    >>> out.outputs.shape
    (2, 5, 4)

A single step is `cell(params, states, x_t, t) -> (states, output)`.
"""

from .._recurrent.protocol import Cell as Cell
from . import _serialization as _serialization
from .attention import AttendingCell as AttendingCell
from .attention import Attention as Attention
from .attention import AttentionOutput as AttentionOutput
from .attention import AttentionParams as AttentionParams
from .attention import AttentionState as AttentionState
from .base import SizedCell as SizedCell
from .basic import GRU as GRU
from .basic import LSTM as LSTM
from .basic import LSTMP as LSTMP
from .basic import RNN as RNN
from .conv import ConvLSTM as ConvLSTM
from .conv import ConvLSTMParams as ConvLSTMParams
from .diagonal import ParaGRU as ParaGRU
from .diagonal import ParaGRUParams as ParaGRUParams
from .diagonal import ParaLSTM as ParaLSTM
from .diagonal import ParaLSTMParams as ParaLSTMParams
from .explanation import explain as explain
from .gated import RGLRU as RGLRU
from .gated import GatedParams as GatedParams
from .gated import MinGRU as MinGRU
from .gated import MinLSTM as MinLSTM
from .gated import RGLRUParams as RGLRUParams
from .linear import LRU as LRU
from .linear import S5 as S5
from .linear import LRUParams as LRUParams
from .linear import S5Params as S5Params
from .linear_base import LinearCell as LinearCell
from .milstm import MILSTM as MILSTM
from .milstm import MILSTMParams as MILSTMParams
from .norm import LayerNormGRU as LayerNormGRU
from .norm import LayerNormLSTM as LayerNormLSTM
from .norm import LayerNormMILSTM as LayerNormMILSTM
from .norm import LayerNormMILSTMParams as LayerNormMILSTMParams
from .norm import LayerNormParams as LayerNormParams
from .sampling import sample as sample
from .stack import Bidirectional as Bidirectional
from .stack import BothDirections as BothDirections
from .stack import Stack as Stack
from .states import repeat_state as repeat_state
from .states import trainable_state as trainable_state
from .variants import IndRNN as IndRNN
from .variants import IndRNNParams as IndRNNParams
from .variants import PeepholeLSTM as PeepholeLSTM
from .variants import PeepholeLSTMParams as PeepholeLSTMParams
from .wrappers import Dropout as Dropout
from .wrappers import DropoutMasks as DropoutMasks
from .wrappers import Residual as Residual
from .wrappers import Zoneout as Zoneout
