"""The cuda backend: kernels on an NVIDIA GPU for all modes, with XLA around them.

A kernel runs all steps of all directions of a layer, forward or backward. The products
with the input, the gradients of weights, and whatever else does not wait for another
step, are XLA's.
"""

from __future__ import annotations

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _config
from .._cuda import check, device, kernels, plan
from .._cuda.launch import launch
from .._typing import Array
from . import xla_network, xla_packed
from .backend import Backend, BackendStatus
from .call import Differentiable, Operands, Outputs, Residuals, RNNCall, Saved
from .cell import LayerWeights, States
from .spec import RNNSpec
from .xla_layer import Layer, LayerGradients, LayerOutput, LayerPrimal, StepMasks

TRIAL = "ostinato._rnn.cuda_trial"
"""The program that tries a kernel once on each kind of GPU."""

# Those with which XLA, too, rounds the factors of products of float32 on a GPU.
_ROUNDED_FACTORS = (
    None,
    "default",
    "fastest",
    "tensorfloat32",
    "high",
    lax.Precision.DEFAULT,
    lax.Precision.HIGH,
    lax.DotAlgorithmPreset.TF32_TF32_F32,
)


def status() -> BackendStatus:
    """Return the status of the backend on this machine."""
    gpu, reason = device.status()
    if gpu is None:
        return BackendStatus(False, str(reason))
    taken = "are measured" if gpu.arch in plan.MEASURED else "run when asked for"
    detail = (
        f"{gpu.name} ({gpu.arch}), driver for CUDA {gpu.driver}; kernels of the "
        f"operator, linear recurrences and element-wise loops, which {taken}"
    )
    texts = (*kernels.TEXTS, *kernels.RECURRENT_TEXTS)
    for text, failure in check.failures(texts, gpu).items():
        detail += f"; disabled: {text}: {failure}"
    return BackendStatus(True, detail)


def unsupported_reason(spec: RNNSpec, dtype: Any) -> str | None:
    """Return why the backend cannot run the call; None if it can."""
    gpu, reason = device.status()
    if gpu is None:
        return reason
    for name, default in _FIXED.items():
        value = getattr(spec, name)
        if value != default:
            return f"it has no kernels for {name}={value!r}"
    _, units = _heads(spec)
    return plan.rnn_reason(spec.mode, np.dtype(dtype).name, units, gpu)


_FIXED = dict(
    proj_size=0,
    cell_clip=None,
    reset_after=True,
    input_mode="linear",
    batch_invariant=False,
)


def unasked_reason() -> str | None:
    """Return why calls that name no backend run no kernels of GPUs; None if they do.

    The same holds for the operator, linear recurrences and loops over steps.
    """
    if _config.read().backend == "cuda":
        return None
    return plan.unmeasured_reason()


def refusal(call: RNNCall, operands: Operands) -> str | None:
    """Return why the backend cannot run a call of a spec that it can run.

    The first call of a kernel on a kind of GPU starts its trial, in another process.
    """
    both = call.precision if isinstance(call.precision, tuple) else (call.precision,)
    rounded = all(each in _ROUNDED_FACTORS for each in both)
    if operands.x.dtype == np.float32 and not rounded:
        return (
            f"its kernels round factors to 10 bits, and precision={call.precision} "
            "asks for more"
        )
    _, batch = sizes = call.sizes(operands)
    if not all(isinstance(size, int) for size in sizes):
        return "it needs sizes that are known when a program is compiled"
    gpu, reason = device.status()
    if gpu is None:
        return reason
    layout = plan_of(call.spec, operands.x.dtype, batch, gpu)
    return layout if isinstance(layout, str) else _failure(layout, gpu)


def known_refusal(spec: RNNSpec, x: Any) -> str | None:
    """Return why a spec that has kernels does not run them, as far as it is known.

    No trial starts.
    """
    gpu, reason = device.status()
    if gpu is None:
        return reason
    layout = plan_of(spec, x.dtype, _batch_of(x), gpu)
    if isinstance(layout, str):
        return layout
    texts = kernels.of_layer(layout, gpu)
    failures = check.failures(texts, gpu)
    return next((failures[text] for text in texts if text in failures), None)


def _failure(layout: plan.RnnPlan, gpu: device.Gpu) -> str | None:
    """Return how a kernel of a layout failed its trial here; None if all passed."""
    failures = (
        check.failure(text, gpu, TRIAL) for text in kernels.of_layer(layout, gpu)
    )
    return next((each for each in failures if each is not None), None)


def describe(spec: RNNSpec, x: Any) -> str:
    """Return how a call that has a kernel is laid out on the GPU."""
    gpu, _ = device.status()
    assert gpu is not None
    layout = plan_of(spec, x.dtype, _batch_of(x), gpu)
    return f"{gpu.name}, in each layer {layout}"


def _batch_of(x: Any) -> int:
    """Return the sequences of `[B, T, I]`, or 1, also if the shape is not known."""
    shape = getattr(x, "shape", ())
    return shape[0] if len(shape) == 3 and isinstance(shape[0], int) else 1


def forward(call: RNNCall, operands: Operands) -> tuple[Outputs, Saved | None]:
    """Run the network; return its outputs, and `Saved` only if the call saves."""
    network = ft.partial(xla_network.forward, run_layer=_run_layer)
    return xla_packed.run_padded(network, call, operands)


def backward(
    call: RNNCall,
    operands: Operands,
    residuals: Residuals,
    bar: Outputs,
    wrt: Differentiable,
) -> Differentiable:
    """Return the gradients that `wrt` asks for, from the outputs' cotangents `bar`."""
    network = ft.partial(xla_network.backward, run_layer=_run_layer_backward)
    return xla_packed.run_padded(network, call, operands, residuals, bar, wrt=wrt)


def plan_of(
    spec: RNNSpec, dtype: Any, batch: int, gpu: device.Gpu
) -> plan.RnnPlan | str:
    """Return the layout of a layer, or the reason why it has none."""
    heads, units = _heads(spec)
    name = np.dtype(dtype).name
    return plan.rnn(spec.mode, name, units, spec.num_directions * heads, batch, gpu)


def _heads(spec: RNNSpec) -> tuple[int, int]:
    """Return the heads of a direction as kernels have them, and the units of each.

    Small ones are joined, as a kernel would round the units of each up.
    """
    units = spec.hidden_size // spec.num_heads
    most = max(1, plan.FEWEST_UNITS // units)
    joined = next(k for k in range(most, 0, -1) if spec.num_heads % k == 0)
    return spec.num_heads // joined, units * joined


def _run_layer(
    operands: Operands,
    layers: list[Layer],
    x: Array,
    initials: list[States],
    masks: StepMasks,
) -> tuple[Array, list[LayerOutput]]:
    """Run all directions of a layer, as `xla_network.run_by_scans`."""
    cell = layers[0].cell
    call, spec = cell.call, cell.spec
    steps, batch, _ = x.shape
    if 0 in (steps, batch):
        return xla_network.run_by_scans(operands, layers, x, initials, masks)
    gpu, reason = device.status()
    assert gpu is not None, reason
    # Where the batch is divided among GPUs, these have other kernels than all of it.
    layout = plan_of(spec, x.dtype, batch, gpu)
    if isinstance(layout, str) or _failure(layout, gpu) is not None:
        return xla_network.run_by_scans(operands, layers, x, initials, masks)
    directions, hidden = len(layers), spec.hidden_size
    weights = [layer.cell.weights for layer in layers]
    rows = jnp.concatenate([_by_unit(_blocks(spec, w.w_ih)) for w in weights])
    bias = jnp.concatenate([_biases(spec, w) for w in weights])
    gx = cell.add_bias(_by_lane(spec, cell.dot(x, rows)), bias)
    h_0, cells_0 = _stacked(initials)
    like = lambda *shape, dtype=x.dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    absent = (None,) * (2 - directions)
    count, blocks = len(initials[0]) - 1, len(cell.saved)
    gates = cells = None
    if call.save and call.saves_gates:
        gates = like(steps, batch, blocks * hidden)
    if call.save and count:
        cells = like(steps, batch, count * hidden, dtype=jnp.float32)
    results = (
        like(steps, batch, directions * hidden),
        like(directions, batch, hidden),
        like(directions, batch, count, hidden) if count else None,
        *((gates,) * directions + absent),
        *((cells,) * directions + absent),
    )
    found = iter(
        launch(
            kernels.compiled(kernels.recurrent(layout), gpu.arch),
            "recurrent_run",
            layout.grid,
            (
                gx,
                _packed(layout, _recurrent(spec, weights)),
                h_0,
                cells_0,
                operands.seq_lengths,
                _order(operands),
                None if masks.reset is None else masks.reset[..., 0],
            ),
            results,
            (steps, batch, hidden, _heads(spec)[1], directions),
            weights=1,
        )
    )
    arrays: list[Any] = [None if each is None else next(found) for each in results]
    y, h_n, cells_n, *saved = arrays
    outs = []
    for d in range(directions):
        final = (h_n[d], *(cells_n[d, :, i] for i in range(count)))
        others = jnp.split(saved[2 + d], count, axis=-1) if cells is not None else ()
        h = y[..., d * hidden : (d + 1) * hidden]
        outs.append(LayerOutput(h, final, saved[d], tuple(others)))
    return y, outs


def _stacked(states: list[States]) -> tuple[Array, Array | None]:
    """Return the states of all directions: h, and `[D, B, count, H]` of all others."""
    h = jnp.stack([each[0] for each in states])
    if len(states[0]) == 1:
        return h, None
    return h, jnp.stack([jnp.stack(each[1:], axis=-2) for each in states])


def _run_layer_backward(
    operands: Operands,
    layers: list[Layer],
    primals: list[LayerPrimal],
    dh: Array,
    dfinals: list[States],
    need_x: bool,
    need_weights: bool,
) -> list[LayerGradients]:
    """Return the gradients of a layer, as `xla_network.backward_by_scans`."""
    spec, hidden = layers[0].cell.spec, layers[0].cell.spec.hidden_size
    (steps, batch, _), directions = dh.shape, len(layers)
    gpu, reason = device.status()
    assert gpu is not None, reason
    layout = plan_of(spec, dh.dtype, batch, gpu)
    cell = layers[0].cell
    if (
        0 in (steps, batch)
        or isinstance(layout, str)
        or plan.backward_reason(layout, gpu) is not None
        or _failure(layout, gpu) is not None
    ):
        return xla_network.backward_by_scans(
            operands, layers, primals, dh, dfinals, need_x, need_weights
        )
    absent: Any = [None] * (2 - directions)
    # With `recompute`, the gates of this layer, and of no other, are there again.
    ats = [
        layer.with_gates(primal.x, layer.step_primal(primal))
        for layer, primal in zip(layers, primals, strict=True)
    ]
    dh_n, dcells_n = _stacked(dfinals)
    weights = _recurrent(spec, [layer.cell.weights for layer in layers])
    like = lambda *shape: jax.ShapeDtypeStruct(shape, dh.dtype)  # noqa: E731
    resets = primals[0].masks.reset
    num_gates = 4 if cell.saved else 1
    found = launch(
        kernels.compiled(kernels.recurrent_backward(layout), gpu.arch),
        "recurrent_backward",
        layout.backward_grid,
        (
            *(at.gates if cell.saved else at.after[0] for at in ats), *absent,
            *(_read(at.after) for at in ats), *absent,
            *(at.before[0] if spec.mode == "gru" else _read(at.before) for at in ats),
            *absent,
            _packed_backward(layout, weights),
            dh,
            dh_n,
            dcells_n,
            operands.seq_lengths,
            _order(operands),
            None if resets is None else resets[..., 0],
        ),
        (
            *[like(steps, batch, num_gates * hidden)] * directions, *absent,
            like(*dh_n.shape),
            None if dcells_n is None else like(*dcells_n.shape),
        ),
        (steps, batch, hidden, _heads(spec)[1], directions),
        weights=6,
    )  # fmt: skip
    dgates, (dh_0, *others) = found[:directions], found[directions:]
    gradients = []
    for d, (layer, primal, at) in enumerate(zip(layers, primals, ats, strict=True)):
        cotangents = (dgates[d],)
        if spec.num_gates == 3:
            cotangents = (dgates[d][..., : 3 * hidden], dgates[d][..., 3 * hidden :])
        dx = dweights = None
        if need_x:
            dx = layer.cell.input_gradient(cotangents[0])
        if need_weights:
            dweights = layer.cell.weight_gradients(primal.x, at, cotangents)
            dweights = jax.tree.map(layer.cell.narrow, dweights)
        cells = [dcells[d, :, i] for dcells in others for i in range(dcells.shape[2])]
        initial = (dh_0[d], *cells)
        gradients.append(LayerGradients(dx, dweights, initial))
    return gradients


def _order(operands: Operands) -> Array | None:
    """Return the sequences from long to short, so that clusters of short ones end."""
    if operands.seq_lengths is None:
        return None
    return jnp.argsort(-operands.seq_lengths).astype(jnp.int32)


def _read(states: States) -> Array | None:
    """Return the states beside h that a step backwards reads, side by side.

    These are c, and n of an sLSTM.
    """
    return jnp.concatenate(states[1:3], axis=-1) if len(states) > 1 else None


def _blocks(spec: RNNSpec, rows: Array) -> Array:
    """Return rows, or biases, as `[gates, H, ...]`."""
    return rows.reshape(spec.num_gates, spec.hidden_size, *rows.shape[1:])


def _by_unit(blocks: Array) -> Array:
    """Return blocks as rows `[H * gates, ...]`, those of a unit side by side."""
    return jnp.swapaxes(blocks, 0, 1).reshape(-1, *blocks.shape[2:])


def _by_slot(spec: RNNSpec, rows: Array) -> Array:
    """Return recurrent rows, or their biases, as blocks, those of a GRU as four.

    Its candidate's products with the input and with the state are not added, and the
    first of them is the third block, which has zeros here.
    """
    blocks = _blocks(spec, rows)
    if spec.num_gates != 3:
        return blocks
    return jnp.concatenate([blocks[:2], jnp.zeros_like(blocks[:1]), blocks[2:]])


def _by_lane(spec: RNNSpec, a: Array) -> Array:
    """Fill up the last axis, rows of all units of any directions, to four for a lane.

    A lane has a unit of a GRU, which has three rows, or four units of a simple RNN,
    whose number in a head is rounded up.
    """
    if spec.num_gates == 4:
        return a
    each = 3 if spec.num_gates == 3 else _heads(spec)[1]
    parts = a.reshape(*a.shape[:-1], -1, each)
    more = ((0, 0),) * (a.ndim) + ((0, -each % 4),)
    return jnp.pad(parts, more).reshape(*a.shape[:-1], -1)


def _biases(spec: RNNSpec, weights: LayerWeights) -> Array:
    """Return the sum of both biases, float32, four for each lane."""
    total = jnp.zeros(spec.hidden_size * spec.num_gates, jnp.float32)
    if weights.b_ih is not None:
        total += _by_unit(_blocks(spec, weights.b_ih)).astype(jnp.float32)
    total = _by_lane(spec, total)
    if weights.b_hh is None:
        return total
    own = _by_unit(_by_slot(spec, weights.b_hh)).astype(jnp.float32)
    return total + (own if spec.num_gates > 1 else _by_lane(spec, own))


def _recurrent(spec: RNNSpec, weights: list[LayerWeights]) -> Array:
    """Return recurrent weights `[D * K, slots, U, U]`, one matrix a head.

    K and U are the heads and units of `_heads`; those that are joined have blocks of
    one matrix, with zeros elsewhere.
    """
    heads, units = _heads(spec)
    slots = jnp.stack([_by_slot(spec, w.w_hh) for w in weights])
    own = slots.shape[-1]
    joined = units // own
    blocks = slots.reshape(-1, slots.shape[1], heads, joined, own, 1, own)
    diagonal = jnp.eye(joined, dtype=bool)[:, None, :, None]
    apart = jnp.swapaxes(jnp.where(diagonal, blocks, 0), 1, 2)
    return apart.reshape(-1, slots.shape[1], units, units)


def _packed(layout: plan.RnnPlan, weights: Array) -> Array:
    """Return recurrent weights `[matrices, slots, H, H]` as a kernel reads them.

    That is uint32 `[matrices, cluster, warps, 2, depth, 32, 4]`: for each product of
    tiles, which has two of the four rows of eight lanes, the words of each lane; see
    MultiplyTiles in _cuda/text/primitives.h.
    """
    rows = _padded(layout, weights)
    if layout.units_of_lane > 1:  # four units of a lane in the place of four gates
        lanes = rows.reshape(len(rows), -1, layout.units_of_lane, layout.units)
        rows = jnp.swapaxes(lanes, 1, 2)
    words = _words(layout, rows)
    apart = words.reshape(
        len(weights), 2, 2, layout.cluster, layout.warps, 8, layout.depth, 2, 4
    )
    # matrix, cluster, warp, pair of rows, product, lane, word, half of words, row
    ordered = apart.transpose(0, 3, 4, 1, 6, 5, 8, 7, 2)
    return ordered.reshape(*ordered.shape[:5], 32, 4)


def _packed_backward(layout: plan.RnnPlan, weights: Array) -> Array:
    """Return the same for the backward pass, whose rows are those of the transpose.

    uint32 `[matrices, cluster, tiles of 16 units, products, 32, 4]`; the columns of a
    block are sorted by groups of eight units, then gates, then units. In a simple RNN
    they are its units, whose rows are sorted by what lanes have of them.
    """
    padded = _padded(layout, weights)
    count, units, cluster = len(weights), layout.units, layout.cluster
    if layout.units_of_lane == 1:
        apart = padded.reshape(count, 4, cluster, layout.warps, 8, units)
        columns = apart.transpose(0, 2, 5, 3, 1, 4)
    else:
        apart = padded.reshape(count, cluster, -1, cluster * layout.warps, 8, 4)
        columns = apart.transpose(0, 1, 3, 5, 4, 2)
    words = _words(layout, columns.reshape(count, cluster, units, -1))
    tiles = words.reshape(count, cluster, units // 16, 2, 8, -1, 2, 4)
    # matrix, cluster, tile, product, unit, word, half of words, half of units
    ordered = tiles.transpose(0, 1, 2, 5, 4, 7, 6, 3)
    return ordered.reshape(*ordered.shape[:4], 32, 4)


def _padded(layout: plan.RnnPlan, weights: Array) -> Array:
    """Return weights `[matrices, slots, H, H]` with H rounded up to `layout.units`."""
    more = layout.units - weights.shape[-1]
    return jnp.pad(weights, ((0, 0), (0, 0), (0, more), (0, more)))


def _words(layout: plan.RnnPlan, rows: Array) -> Array:
    """Return the last axis in words, uint32."""
    per_word = layout.units // layout.words
    if per_word > 1:
        rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] // per_word, per_word)
    return lax.bitcast_convert_type(rows, jnp.uint32)


BACKEND = Backend(
    name="cuda",
    platform="cuda",
    status=status,
    unsupported_reason=unsupported_reason,
    implementations={"forward": forward, "backward": backward},
    exports="named",
    unasked_reason=unasked_reason,
    refusal=refusal,
    known_refusal=known_refusal,
    describe=describe,
)
