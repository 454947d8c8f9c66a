"""Weights of the sLSTM layers of the package `xlstm` and of TiRex, in and out.

    from ostinato.interop import xlstm as from_xlstm

    spec, weights, notes = from_xlstm.from_state_dict(model.state_dict(), prefix)
    y, state = ostinato.rnn(spec, weights, x)

A layer (`sLSTMLayer`) has a matrix for each gate and head, the cell with its recurrent
matrices and biases, and a group norm, which is no part of the network. In the package
`xlstm` a causal convolution may stand before two of the gates: the network then reads
`[silu(conv1d(x)), x]`, joined on the last axis.

Both libraries call the matrix of the input gate `fgate`, and that of the forget gate
`igate`: they join the gates in the order `fgate igate zgate ogate`, and their cells
read them as `i f z o`. Written for `xlstm` 2.0.6 and `tirex-ts` 1.4.2. A state dict may
hold tensors, or arrays of numpy: only `to_state_dict` needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .. import LayerWeights, RNNSpec, _checks, pack_weights
from .._rnn.spec import check_spec
from .._typing import Array, Float
from .exported import join_biases, pseudo_layer
from .imported import Imported, as_array, check_state_dict
from .torch import as_tensor

__all__ = ["find", "from_state_dict", "to_state_dict"]

_GATES = ("fgate", "igate", "zgate", "ogate")  # those of i f z o
_KERNEL, _BIAS = "slstm_cell._recurrent_kernel_", "slstm_cell._bias_"
_CONVOLUTION = "conv1d.conv.weight"


def find(sd: Mapping[str, Any]) -> list[str]:
    """Return the prefixes of all sLSTM layers in a state dict.

    Raises:
        TypeError: `sd` is no mapping.
    """
    check_state_dict(sd)
    return [
        name.removesuffix(_KERNEL)
        for name in sd
        if isinstance(name, str) and name.endswith(_KERNEL)
    ]


def from_state_dict(sd: Mapping[str, Any], prefix: str = "") -> Imported:
    """Convert the sLSTM layer whose tensors begin with `prefix`.

    Args:
        sd: a state dict of a model, a block or a layer; tensors of torch or arrays.
        prefix: what stands before `slstm_cell._bias_` in the names, such as
            `"slstm_layer."` for a block of TiRex; `find` lists them.

    Returns:
        `Imported(spec, weights, notes)` of one layer with `bias="input"`. Its input has
        the size of the layer, or twice that behind a convolution; the notes say so.

    Raises:
        TypeError: a tensor holds no floats, `sd` is no mapping, or `prefix` no string.
        ValueError: there is no such layer under `prefix`, or shapes do not fit.
    """
    check_state_dict(sd, prefix)
    found = {}
    for name in (*(f"{gate}.weight" for gate in _GATES), _KERNEL, _BIAS):
        if prefix + name not in sd:
            there = find(sd)
            hint = " or ".join(f"prefix={one!r}" for one in there)
            hint = f"; give {hint}" if hint else "; it has no sLSTM layer"
            raise ValueError(
                f"`sd` must hold {prefix + name!r}{'' if prefix in there else hint}"
            )
        found[name] = as_array(prefix + name, sd[prefix + name])
    dtype = jnp.result_type(*found.values())
    found = {name: value.astype(dtype) for name, value in found.items()}
    kernel = found[_KERNEL]
    heads, size = _sizes(prefix + _KERNEL, kernel)
    for name, value in found.items():
        want = (4 * heads * size,) if name == _BIAS else (heads, size, size)
        if name != _KERNEL and value.shape != want:
            raise ValueError(
                f"`sd[{prefix + name!r}]` must have shape {want}, which follows from "
                f"{prefix + _KERNEL!r}, got {value.shape}"
            )
    hidden, convolves = heads * size, prefix + _CONVOLUTION in sd
    matrices = [_dense(found[f"{gate}.weight"]) for gate in _GATES]
    if convolves:
        matrices = [
            jnp.pad(a, ((0, 0), (0, hidden) if n < 2 else (hidden, 0)))
            for n, a in enumerate(matrices)
        ]
    if kernel.shape[1] == 4 * size:  # the backend "vanilla": [heads, gates * out, in]
        w_hh = kernel.reshape(heads, 4, size, size).transpose(1, 0, 2, 3)
        b = found[_BIAS]
    else:  # the backend "cuda", and TiRex: [heads, in, gates * out]
        w_hh = kernel.reshape(heads, size, 4, size).transpose(2, 0, 3, 1)
        b = found[_BIAS].reshape(heads, 4, size).transpose(1, 0, 2).reshape(-1)
    spec = RNNSpec(
        "slstm",
        hidden * (2 if convolves else 1),
        hidden,
        bias="input",
        num_heads=heads,
    )
    layer = LayerWeights(
        jnp.concatenate(matrices), w_hh.reshape(4 * hidden, size), b, None, None
    )
    notes = ["the group norm of the layer is not part of the network"]
    if convolves:
        notes.append("the input is [silu(conv1d(x)), x], joined on the last axis")
    return Imported(spec, pack_weights([layer], spec), tuple(notes))


def to_state_dict(
    spec: RNNSpec,
    weights: Float[Array, " num_params"],
    prefix: str = "",
    *,
    backend: Literal["vanilla", "cuda"] = "cuda",
    layer: int = 0,
) -> dict[str, Any]:
    """Convert one layer to tensors that a layer of `xlstm` or TiRex loads.

    Args:
        spec: the network, of mode `"slstm"`.
        weights: its flat vector.
        prefix: put before every name.
        backend: that of the package `xlstm`, which decides how matrices lie; TiRex has
            `"cuda"`.
        layer: which layer.

    Returns:
        Tensors by name, copies: the gates, the recurrent matrices and the biases, which
        are the sums of both. The group norm and the convolution are not among them, so
        that `load_state_dict` needs `strict=False`.

    Raises:
        TypeError: `weights` is no array of floats, or traced; `prefix` is no string.
        ValueError: another mode; `proj_size`, `input_mode="skip"`; an input of another
            size than the layer, or than twice the layer; values in `w_ih` where a head
            would read the inputs of another one, or where a gate reads what it does not
            read behind a convolution.
        ImportError: torch is not installed.
    """
    check_spec(spec)
    _checks.check_text("`prefix`", prefix)
    _checks.check_choice("backend", backend, ("vanilla", "cuda"))
    target = "a layer of xlstm"
    for name, value in (
        ("mode", "slstm"),
        ("proj_size", 0),
        ("input_mode", "linear"),
        ("bidirectional", False),
    ):
        if getattr(spec, name) != value:
            raise ValueError(
                f"`spec` must have {name}={value!r} for {target}, got "
                f"{getattr(spec, name)!r}"
            )
    parts = pseudo_layer(spec, weights, layer)
    heads, hidden = spec.num_heads, spec.hidden_size
    size, inputs = hidden // heads, parts.w_ih.shape[1]
    if inputs not in (hidden, 2 * hidden):
        raise ValueError(
            f"`spec` must have an input of size {hidden} or, behind a convolution, "
            f"{2 * hidden} for {target}, got {inputs}"
        )
    found = {}
    for n, gate in enumerate(_GATES):
        rows = parts.w_ih[n * hidden : (n + 1) * hidden]
        first = hidden if inputs > hidden and n >= 2 else 0
        blocks = rows[:, first : first + hidden].reshape(heads, size, heads, size)
        own = jnp.stack([blocks[k, :, k] for k in range(heads)])
        if np.count_nonzero(rows) != np.count_nonzero(own):
            raise ValueError(
                f"`weights` must have 0 in w_ih of gate {'ifzo'[n]!r} outside of "
                f"blocks of {size} units for {target}, whose heads read their own "
                "inputs alone"
            )
        found[f"{gate}.weight"] = own
    w_hh = parts.w_hh.reshape(4, heads, size, size)
    b, _ = join_biases(spec, parts, target, fold=True)
    b = jnp.zeros(4 * hidden, parts.w_hh.dtype) if b is None else b
    if backend == "vanilla":
        found[_KERNEL] = w_hh.transpose(1, 0, 2, 3).reshape(heads, 4 * size, size)
        found[_BIAS] = b
    else:
        found[_KERNEL] = w_hh.transpose(1, 3, 0, 2).reshape(heads, size, 4 * size)
        found[_BIAS] = b.reshape(4, heads, size).transpose(1, 0, 2).reshape(-1)
    return {prefix + name: as_tensor(value) for name, value in found.items()}


def _sizes(name: str, kernel: Array) -> tuple[int, int]:
    """Return the number of heads and the units of each."""
    shape = kernel.shape
    if len(shape) != 3 or max(shape[1:]) != 4 * min(shape[1:]) or 0 in shape:
        raise ValueError(
            f"`sd[{name!r}]` must have shape (heads, d, 4 d) or (heads, 4 d, d), got "
            f"{shape}"
        )
    return shape[0], min(shape[1:])


def _dense(blocks: Array) -> Array:
    """Return a matrix with blocks `[heads, d, d]` on its diagonal."""
    heads, size, _ = blocks.shape
    own = jnp.eye(heads, dtype=blocks.dtype)[:, None, :, None]
    return (blocks[:, :, None] * own).reshape(heads * size, heads * size)
