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
from .backend import Backend, BackendStatus
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall
from .spec import RNNSpec

_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # numbered as in native/cpu/kernels.h
_BIASES = ("none", "input", "recurrent", "double")  # bit 0: b_ih, bit 1: b_hh
_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.float64, jnp.bfloat16)))


def status() -> BackendStatus:
    """Tell whether this machine has it, and for which instructions."""
    reason = _native.status().reason
    if reason is not None:
        return BackendStatus(False, reason)
    features, config = _native.cpu_features(), _config.read()
    kernels = f"kernels for {features.isa}"
    if features.isa != config.cpu_isa == _config.CPU_ISAS[-1]:
        kernels += f" (not {config.cpu_isa}: {_native.why_no_tiles()})"
    threads = config.num_threads or features.cpus
    return BackendStatus(True, f"{kernels}, threads: {threads}")


def unsupported_reason(spec: RNNSpec, dtype: Any) -> str | None:
    """Return why the backend does not run this; None if it does."""
    reason = _native.status().reason
    if reason is not None:
        return reason
    if spec.mode not in _MODES:
        return f"it has no kernels for mode {spec.mode!r}"
    if np.dtype(dtype) not in _DTYPES:
        return f"it has no kernels for {np.dtype(dtype)}"
    if not spec.reset_after:
        return "it has no kernels for a GRU with reset_after=False"
    return None


def forward(
    call: RNNCall,
    results: list[jax.ShapeDtypeStruct],
    ensemble: Sequence[bool],
    operands: Operands,
) -> Sequence[Array]:
    """Return the leaves of `RNNCall.output_shapes`."""
    attributes = _attributes(call, ensemble, operands)
    return jax.ffi.ffi_call("ostinato_rnn_fwd", results)(
        *jax.tree.leaves(operands), **attributes
    )


def backward(
    call: RNNCall,
    results: list[jax.ShapeDtypeStruct],
    ensemble: Sequence[bool],
    operands: Operands,
    residuals: Residuals,
    bar: Outputs,
    wrt: Differentiable,
) -> Sequence[Array]:
    """Return the leaves of `RNNCall.gradient_shapes`."""
    attributes = _attributes(call, ensemble, operands, wrt.items())
    return jax.ffi.ffi_call("ostinato_rnn_bwd", results)(
        *jax.tree.leaves((operands, residuals, bar)), **attributes
    )


def packed_size(spec: RNNSpec, dtype: Any) -> int:
    """Return the bytes of what `pack` makes of one weight vector."""
    library = _native.status().library
    assert library is not None
    number = _DTYPES.index(np.dtype(dtype))
    return library.ostinato_packed_bytes(number, *_network(spec).values())


def pack(spec: RNNSpec, weights: Array) -> Array:
    """Return weights `[E, num_params]` as the kernels read them: uint8 `[E, bytes]`."""
    size = packed_size(spec, weights.dtype)
    result = jax.ShapeDtypeStruct((weights.shape[0], size), jnp.uint8)
    operands = Operands(weights, x=None, states=())
    attributes = _attributes(RNNCall(spec), (True,), operands)
    return jax.ffi.ffi_call("ostinato_rnn_pack", result)(weights, **attributes)


def _network(spec: RNNSpec) -> dict[str, int]:
    """Return what decides how weights are packed, as ostinato_packed_bytes takes it."""
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
    ensemble: Sequence[bool],
    operands: Operands,
    wrt: Sequence[bool] = (),
) -> dict[str, Any]:
    """Return all of them for every target, so that one decoder serves all."""
    spec = call.spec
    integers = _network(spec) | {
        "clip_nan": spec.clip_nan,
        "batch_invariant": spec.batch_invariant,
        "time_major": call.time_major,
        "packed_buffers": 0 if call.packed is None else call.packed.buffers,
        "max_length": 0 if call.packed is None else call.packed.max_length,
        "save": call.save,
        "recompute": call.recompute,
        "operands": _bits(
            operands.seq_lengths is not None,
            operands.resets is not None,
            bool(operands.dropout_masks),
            operands.prepared is not None,
        ),
        "wrt": _bits(*wrt),
    }
    return {name: np.int64(value) for name, value in integers.items()} | {
        "cell_clip": np.float64(math.inf if spec.cell_clip is None else spec.cell_clip),
        "dropout_scale": np.float64(call.dropout_scale),
        "ensemble": np.array(ensemble, np.int64),
    }


def _bits(*flags: bool) -> int:
    """Return a number with the first flag as bit 0."""
    return sum(flag << place for place, flag in enumerate(flags))


BACKEND = Backend(
    name="cpu",
    platform="cpu",
    status=status,
    unsupported_reason=unsupported_reason,
    implementations={"forward": forward, "backward": backward},
    runs_ensembles=True,
    exports=False,
    packed_size=packed_size,
    pack=pack,
)
