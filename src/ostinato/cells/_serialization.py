"""Registration of the cells' named tuples for `jax.export`."""

from __future__ import annotations

from jax import export

from .attention import AttentionOutput, AttentionParams, AttentionState
from .conv import ConvLSTMParams
from .diagonal import ParaGRUParams, ParaLSTMParams
from .gated import GatedParams, RGLRUParams
from .linear import LRUParams, S5Params
from .milstm import MILSTMParams
from .norm import LayerNormMILSTMParams, LayerNormParams
from .stack import BothDirections
from .variants import IndRNNParams, PeepholeLSTMParams
from .wrappers import DropoutMasks

for kind in (
    AttentionOutput,
    AttentionParams,
    AttentionState,
    BothDirections,
    ConvLSTMParams,
    DropoutMasks,
    GatedParams,
    IndRNNParams,
    LRUParams,
    LayerNormMILSTMParams,
    LayerNormParams,
    MILSTMParams,
    ParaGRUParams,
    ParaLSTMParams,
    PeepholeLSTMParams,
    RGLRUParams,
    S5Params,
):
    export.register_namedtuple_serialization(
        kind, serialized_name=f"ostinato.{kind.__name__}"
    )
