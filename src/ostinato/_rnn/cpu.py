"""The cpu backend: what its kernels run, and the calls into the native library.

Arguments and results of a call are the leaves of the named tuples in `call.py`, in
their order; what is static about it travels as attributes. native/ffi/rnn_cpu.cc reads
both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config, _native
from .._typing import Array
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall
from .spec import RNNSpec

_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # numbered as in native/cpu/kernels.h
_BIASES = ("none", "input", "recurrent", "double")  # bit 0: b_ih, bit 1: b_hh
_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.float64, jnp.bfloat16)))


def status() -> tuple[bool, str]:
    """`(available, detail)` on this machine."""
    reason = _native.status().reason
    if reason is not None:
        return False, reason
    features, config = _native.cpu_features(), _config.read()
    kernels = f"kernels for {features.isa}"
    if features.isa != config.cpu_isa == _config.CPU_ISAS[-1]:
        kernels += f" (not {config.cpu_isa}: {_native.why_no_tiles()})"
    return True, f"{kernels}, threads: {config.num_threads or features.cpus}"


def supports(spec: RNNSpec, dtype: Any) -> str | None:
    """None if the backend runs this, else the reason why it does not."""
    reason = _native.status().reason
    if reason is not None:
        return reason
    if np.dtype(dtype) not in _DTYPES:
        return f"it has no kernels for {np.dtype(dtype)}"
    if not spec.reset_after:
        return "it has no kernels for a GRU with reset_after=False"
    return None


def forward(
    call: RNNCall,
    results: list[jax.ShapeDtypeStruct],
    groups: Sequence[bool],
    operands: Operands,
) -> Sequence[Array]:
    """The leaves of `RNNCall.output_shapes`."""
    attributes = _attributes(call, groups, operands)
    return jax.ffi.ffi_call("ostinato_rnn_fwd", results)(
        *jax.tree.leaves(operands), **attributes
    )


def backward(
    call: RNNCall,
    results: list[jax.ShapeDtypeStruct],
    groups: Sequence[bool],
    operands: Operands,
    residuals: Residuals,
    bar: Outputs,
    wrt: Differentiable,
) -> Sequence[Array]:
    """The leaves of `RNNCall.gradient_shapes`."""
    attributes = _attributes(call, groups, operands, wrt)
    return jax.ffi.ffi_call("ostinato_rnn_bwd", results)(
        *jax.tree.leaves((operands, residuals, bar)), **attributes
    )


def packed_size(spec: RNNSpec, dtype: Any) -> int:
    """Bytes of what `pack` makes of one weight vector."""
    library = _native.status().library
    assert library is not None
    number = _DTYPES.index(np.dtype(dtype))
    return library.ostinato_packed_bytes(number, *_network(spec).values())


def pack(spec: RNNSpec, weights: Array) -> Array:
    """Weights `[G, num_params]` as the kernels read them, uint8 `[G, packed_size]`."""
    size = packed_size(spec, weights.dtype)
    result = jax.ShapeDtypeStruct((weights.shape[0], size), jnp.uint8)
    operands = Operands(weights, x=None, h_0=None)
    attributes = _attributes(RNNCall(spec), (True,), operands)
    return jax.ffi.ffi_call("ostinato_rnn_pack", result)(weights, **attributes)


def _network(spec: RNNSpec) -> dict[str, int]:
    """What decides how weights are packed, in the order of ostinato_packed_bytes."""
    return {
        "mode": _MODES.index(spec.mode),
        "input_size": spec.input_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_directions": spec.num_directions,
        "proj_size": spec.proj_size,
        "bias": _BIASES.index(spec.bias),
        "skip": spec.input_mode == "skip",
    }


def _attributes(
    call: RNNCall,
    groups: Sequence[bool],
    operands: Operands,
    wrt: Sequence[bool] = (),
) -> dict[str, Any]:
    """All of them for every target, so that one decoder serves all."""
    spec = call.spec
    integers = _network(spec) | {
        "clip_nan": spec.clip_nan,
        "batch_invariant": spec.batch_invariant,
        "time_major": call.time_major,
        "piles": 0 if call.rows is None else call.rows.piles,
        "max_length": 0 if call.rows is None else call.rows.max_length,
        "save": call.save,
        "recompute": call.recompute,
        "operands": _bits(
            operands.seq_lengths is not None,
            operands.resets is not None,
            bool(operands.keep),
            operands.packed is not None,
        ),
        "wrt": _bits(*wrt),
    }
    return {name: np.int64(value) for name, value in integers.items()} | {
        "cell_clip": np.float64(math.inf if spec.cell_clip is None else spec.cell_clip),
        "dropout_scale": np.float64(call.dropout_scale),
        "groups": np.array(groups, np.int64),
    }


def _bits(*flags: bool) -> int:
    """The first flag as bit 0."""
    return sum(flag << place for place, flag in enumerate(flags))
