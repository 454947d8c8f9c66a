"""The cpu backend: what its kernels run, and the calls into the native library.

The arrays of a call are the leaves of the named tuples in `call.py`, in their order.
What is static about it travels as attributes: `integers` and `reals` in the order of
the tables below, and how many arrays each field of the tuples stands for. The library
has the same tables (native/ffi/contract.h), and tells them as text; a library whose
tables differ from these is not used.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from .. import _config, _native
from .._typing import Array
from .backend import Backend, BackendStatus
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall, Saved
from .modes import MODES
from .spec import RNNSpec

_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.float64, jnp.bfloat16)))
_TUPLES = {
    "operands": Operands,
    "outputs": Outputs,
    "saved": Saved,
    "residuals": Residuals,
    "gradients": Differentiable,
}
_STREAM = (
    "dtype integers reals steps batch weights prepared prepared_bytes "
    "x seq_lengths y h c_0 c_1 c_2"
)
_INTEGERS: dict[str, Callable[[RNNCall], int]] = {
    "mode": lambda call: _modes().index(call.spec.mode),
    "input_size": lambda call: call.spec.input_size,
    "hidden_size": lambda call: call.spec.hidden_size,
    "num_layers": lambda call: call.spec.num_layers,
    "num_directions": lambda call: call.spec.num_directions,
    "proj_size": lambda call: call.spec.proj_size,
    "num_heads": lambda call: call.spec.num_heads,
    "bias_ih": lambda call: call.spec.bias in ("double", "input"),
    "bias_hh": lambda call: call.spec.bias in ("double", "recurrent"),
    "skip": lambda call: call.spec.input_mode == "skip",
    "clip_nan": lambda call: call.spec.clip_nan,
    "batch_invariant": lambda call: call.spec.batch_invariant,
    "time_major": lambda call: call.time_major,
    "packed_buffers": lambda call: 0 if call.packed is None else call.packed.buffers,
    "max_length": lambda call: 0 if call.packed is None else call.packed.max_length,
    "save": lambda call: call.save,
    "recompute": lambda call: call.recompute,
}
_REALS: dict[str, Callable[[RNNCall], float]] = {
    "cell_clip": lambda call: (
        math.inf if call.spec.cell_clip is None else call.spec.cell_clip
    ),
    "dropout_scale": lambda call: call.dropout_scale,
}


def contract(modes: Sequence[str]) -> dict[str, str]:
    """Return what a library has to tell of itself if it has kernels for `modes`."""
    lines = {
        "isas": _config.CPU_ISAS,
        "dtypes": [dtype.name for dtype in _DTYPES],
        "modes": modes,
        "integers": _INTEGERS,
        "reals": _REALS,
        "stream": _STREAM.split(),
    } | {name: _field_names(each) for name, each in _TUPLES.items()}
    return {name: " ".join(words) for name, words in lines.items()} | {
        name: f"gates {' '.join(mode.gates)}, states {' '.join(mode.states)}, "
        f"saved blocks {len(mode.cell.saved)}"
        for name, mode in MODES.items()
        if name in modes
    }


@functools.cache
def disagreement(text: str) -> str | None:
    """Return where the contract of a library differs from ours; None if it does not."""
    theirs = _parse(text)
    ours = contract(theirs.get("modes", "").split())
    for name in ours | theirs:
        if theirs.get(name) != ours.get(name):
            return (
                f"the native library has {name} = {theirs.get(name)!r}, "
                f"want {ours.get(name)!r}; reinstall ostinato to rebuild it"
            )
    return None


def _field_names(of: Any, prefix: str = "") -> Iterator[str]:
    """Return the names of the fields of a named tuple, and of those inside it."""
    for name, hint in get_type_hints(of).items():
        if hasattr(hint, "_fields"):
            yield from _field_names(hint, f"{prefix}{name}.")
        else:
            yield prefix + name


@functools.cache
def _parse(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def _library() -> _native.NativeStatus:
    """Return the native library if it reads calls as this module writes them."""
    library, reason = _native.status()
    if library is None:
        return _native.NativeStatus(None, reason)
    reason = disagreement(library.ostinato_contract().decode())
    return _native.NativeStatus(library if reason is None else None, reason)


def _modes() -> list[str]:
    """Return the modes that the library has kernels for, by their numbers."""
    library, _ = _library()
    if library is None:
        return []
    return _parse(library.ostinato_contract().decode())["modes"].split()


def status() -> BackendStatus:
    """Tell whether this machine has it, and for which instructions."""
    reason = _library().reason
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
    reason = _library().reason
    if reason is not None:
        return reason
    if spec.mode not in _modes():
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
    attributes = _attributes(call, ensemble, [operands], call.output_shapes(operands))
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
    arguments = (operands, residuals, bar)
    gradients = wrt.map(lambda asked: asked or None)
    attributes = _attributes(call, ensemble, arguments, [gradients], wrt.items())
    return jax.ffi.ffi_call("ostinato_rnn_bwd", results)(
        *jax.tree.leaves(arguments), **attributes
    )


def packed_size(spec: RNNSpec, dtype: Any) -> int:
    """Return the bytes of what `pack` makes of one weight vector."""
    library = _library().library
    assert library is not None
    return library.ostinato_prepared_bytes(*_network(spec, dtype))


def is_packed(spec: RNNSpec, dtype: Any, packed: np.ndarray) -> bool:
    """Return True if `packed` is what `pack` makes on this machine, of any weights."""
    library = _library().library
    assert library is not None
    return library.ostinato_is_prepared(
        *_network(spec, dtype), address(packed), packed.nbytes
    )


def _network(spec: RNNSpec, dtype: Any) -> tuple[int, Any]:
    """Return the number of the dtype, and a pointer to the integers of a call."""
    integers = _values(_INTEGERS, RNNCall(spec), np.int64)
    pointer = integers.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    return _DTYPES.index(np.dtype(dtype)), pointer


def pack(spec: RNNSpec, weights: Array) -> Array:
    """Return weights `[E, num_params]` as the kernels read them: uint8 `[E, bytes]`."""
    size = packed_size(spec, weights.dtype)
    result = jax.ShapeDtypeStruct((weights.shape[0], size), jnp.uint8)
    operands = Operands(weights, x=None, states=())
    attributes = _attributes(RNNCall(spec), (True,), [operands], [(result,)])
    return jax.ffi.ffi_call("ostinato_rnn_pack", result)(weights, **attributes)


class StreamCall(ctypes.Structure):
    """A call of `ostinato_stream`: numbers, and addresses of arrays."""

    _fields_ = [(name, ctypes.c_int64) for name in _STREAM.split()]


def stream_call(
    spec: RNNSpec,
    batch: int,
    weights: np.ndarray,
    packed: np.ndarray,
    states: Sequence[np.ndarray],
) -> tuple[Any, StreamCall]:
    """Return the library's function, and a call of it without steps, inputs, outputs.

    All arrays have to live as long as the call; `states` are changed in their places.
    """
    library = _library().library
    assert library is not None
    call = RNNCall(spec)
    made = StreamCall(
        dtype=_DTYPES.index(weights.dtype),
        batch=batch,
        weights=address(weights),
        prepared=address(packed),
        prepared_bytes=packed.nbytes,
    )
    made.kept = _values(_INTEGERS, call, np.int64), _values(_REALS, call, np.float64)
    made.integers, made.reals = map(address, made.kept)
    for name, state in zip(("h", "c_0", "c_1", "c_2"), states, strict=False):
        setattr(made, name, address(state))
    return library.ostinato_stream, made


def address(array: np.ndarray) -> int:
    """Return where the elements of a contiguous array begin."""
    assert array.flags.c_contiguous
    return array.ctypes.data


def raise_error(message: bytes | None) -> None:
    """Raise what a function of the library returned."""
    if message is not None:
        raise RuntimeError(f"the native library failed: {message.decode()}")


def _attributes(
    call: RNNCall,
    ensemble: Sequence[bool],
    arguments: Sequence[Any],
    results: Sequence[Any],
    wrt: Sequence[bool] = (False,),
) -> dict[str, np.ndarray]:
    """Return the attributes of a call, the same ones for every target.

    Args:
        call: the static side.
        ensemble: for each array among the arguments, whether it has an ensemble axis.
        arguments: named tuples.
        results: named tuples; one that is None is left out.
        wrt: which gradients are asked for, as `Differentiable.items`.
    """
    return {
        "integers": _values(_INTEGERS, call, np.int64),
        "reals": _values(_REALS, call, np.float64),
        "ensemble": np.array(ensemble, np.int64),
        "arguments": _counts(arguments),
        "results": _counts(results),
        "wrt": np.array(wrt, np.int64),
    }


def _values(table: dict[str, Callable], call: RNNCall, dtype: Any) -> np.ndarray:
    return np.array([value(call) for value in table.values()], dtype)


def _counts(tuples: Sequence[Any]) -> np.ndarray:
    """Return how many arrays each field stands for, in the order of `_field_names`."""

    def each(of: Any) -> Iterator[int]:
        for field in of:
            if hasattr(field, "_fields"):
                yield from each(field)
            else:
                yield len(jax.tree.leaves(field))

    return np.array([n for t in tuples if t is not None for n in each(t)], np.int64)


BACKEND = Backend(
    name="cpu",
    platform="cpu",
    status=status,
    unsupported_reason=unsupported_reason,
    implementations={"forward": forward, "backward": backward},
    runs_ensembles=True,
    exports="never",
    packed_size=packed_size,
    pack=pack,
)
