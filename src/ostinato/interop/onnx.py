"""Nodes `LSTM`, `GRU` and `RNN` of ONNX, in and out.

    from ostinato.interop import onnx as from_onnx

    networks = from_onnx.from_model("model.onnx")     # by node name
    onnx.save(from_onnx.to_model(spec, weights), "network.onnx")

ONNX orders gates `i o f c` and `z r h`, `c` and `h` being the candidates. Its GRU
resets the state before the product unless `linear_before_reset=1`. Nodes are those of
the main graph: bodies of `If`, `Loop` and `Scan` and local functions are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from .. import LayerWeights, RNNSpec, _checks
from .._modules import needs
from .._typing import Array, Float
from .exported import pseudo_layers, require
from .imported import (
    FLIPPED_BACK,
    Contents,
    Imported,
    as_array,
    build,
    gate_order,
    reorder_gates,
)
from .onnx_files import Graph, read_model

__all__ = ["from_model", "to_model"]

GATES = {"lstm": "i o f g", "gru": "z r n", "rnn_tanh": "h", "rnn_relu": "h"}
"""How ONNX orders the gates, under this package's names."""

_KINDS = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}
_OPS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_ACTIVATIONS = {
    "lstm": ["sigmoid", "tanh", "tanh"],
    "gru": ["sigmoid", "tanh"],
    "rnn_tanh": ["tanh"],
    "rnn_relu": ["relu"],
}
_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
_OUTPUTS = ("Y", "Y_h", "Y_c")
_LAYOUT = frozenset(
    ("Transpose", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Identity")
)
"""Operations that leave all numbers as they are."""

_MANY = 6  # operations that a note lists
_DIRECTIONS = ("forward", "reverse", "bidirectional")
_FOLD = (
    ", which nodes compute; fold constants with onnxsim or "
    "torch.onnx.export(..., optimize=True)"
)
_OLDEST_OPSET = 13
_OPSET = 17
_BFLOAT16_OPSET = 22  # the first whose recurrent operators have it


def from_model(path_or_model: str | os.PathLike[str] | Any) -> dict[str, Imported]:
    """Convert the recurrent nodes of the main graph of a model.

    Nodes inside of other nodes, such as `If`, `Loop` and `Scan`, or inside of local
    functions are not read.

    Args:
        path_or_model: a file, or an `onnx.ModelProto`. Weights may lie in other files
            of the same folder, not elsewhere, and not for a `ModelProto`.

    Returns:
        For each node its name, or that of its first output, and the network. The notes
        tell the layout of time and states, whether lengths and initial states are
        given, whether it runs in reverse, and which node's outputs it reads, through
        which operations: each layer of a stack is a node of its own.

    Raises:
        ValueError: the file is damaged; a node has `clip`, `input_forget`, `P`
            (peepholes) or other activations; its weights are not in the model, or their
            shapes do not fit: the message names the node and the attribute.
        TypeError: `path_or_model` is neither, or weights hold no floats.
        ImportError: onnx is not installed.
    """
    graph = read_model(path_or_model)
    return {name: _convert(graph, name) for name in graph.nodes if _known(graph, name)}


def read_file(path: str | os.PathLike[str]) -> Contents:
    """Return the networks in a file of ONNX, and why other nodes are none."""
    graph, found, others = read_model(path), {}, {}
    for name, node in graph.nodes.items():
        if not _known(graph, name):
            inside = "; what is inside of it is not read" if graph.wraps(node) else ""
            others[name] = f"{node.op_type} is no recurrent node{inside}"
            continue
        try:
            found[name] = _convert(graph, name)
        except (TypeError, ValueError) as error:
            others[name] = str(error)
    return Contents(found, others)


def _known(graph: Graph, name: str) -> bool:
    node = graph.nodes[name]
    return node.domain in ("", "ai.onnx") and node.op_type in _KINDS


def _convert(graph: Graph, name: str) -> Imported:
    node = graph.nodes[name]
    inputs: dict[str, str] = dict(zip(_INPUTS, node.input, strict=False))
    attributes = graph.attributes(node)
    mode, options = _equations(name, node.op_type, attributes)
    if inputs.get("P"):
        wanted = "absent: `ostinato.rnn` has no peepholes; "
        _refuse(name, "P", f"{wanted}`ostinato.cells.PeepholeLSTM` has them", "")
    direction = str(attributes.get("direction", "forward"))
    if direction not in _DIRECTIONS:
        _refuse(name, "direction", " or ".join(_DIRECTIONS), direction)
    directions = 2 if direction == "bidirectional" else 1
    tensors = {}
    for field in ("W", "R", "B"):
        given = inputs.get(field)
        if not given and field == "B":
            continue
        array = graph.constant(given) if given else None
        if array is None:
            hint = _FOLD if given and graph.computes(given) else ""
            _refuse(name, field, "a constant of the model", given or "nothing", hint)
        tensors[field] = array = as_array(f"{name}.{field}", array)
        rank = 2 if field == "B" else 3
        if array.ndim != rank or array.shape[0] != directions:
            _refuse(name, field, f"{directions} of rank {rank}", list(array.shape))
    hidden = tensors["R"].shape[2]
    if attributes.get("hidden_size", hidden) != hidden:
        _refuse(name, "hidden_size", f"{hidden} for its R", attributes["hidden_size"])
    layers = []
    for d in range(directions):
        b_ih = b_hh = None
        if "B" in tensors:
            if tensors["B"].shape[1] % 2:
                _refuse(name, "B", "of even length", list(tensors["B"].shape))
            b_ih, b_hh = jnp.split(tensors["B"][d], 2)
        layers.append(LayerWeights(tensors["W"][d], tensors["R"][d], b_ih, b_hh, None))

    def label(p: int, field: str) -> str:
        return f"{name}.{ {'w_ih': 'W', 'w_hh': 'R'}.get(field, 'B') }[{p}]"

    return build(
        mode,
        layers,
        label,
        order=GATES[mode],
        bidirectional=directions == 2,
        notes=_notes(graph, inputs, direction, attributes),
        **options,
    )


def _equations(
    name: str, kind: str, attributes: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return mode and options that attributes describe, or say which cannot be."""
    mode, options = _KINDS[kind], {}
    for attribute in ("clip", "input_forget"):
        if attributes.get(attribute):
            _refuse(name, attribute, "absent", attributes[attribute])
    given = attributes.get("activations")
    if given is not None:
        names = [str(activation).lower() for activation in _list(given)]
        count = len(_ACTIVATIONS[mode])
        sides = [names[n : n + count] for n in range(0, len(names), count)]
        modes = [m for m in _OPS if _OPS[m] == kind]
        fits = [m for m in modes if sides and all(s == _ACTIVATIONS[m] for s in sides)]
        if not fits:
            wanted = " or ".join(str(_ACTIVATIONS[m]) for m in modes)
            _refuse(name, "activations", f"{wanted} for each direction", names)
        mode = fits[0]
    if kind == "GRU":
        options["reset_after"] = bool(attributes.get("linear_before_reset", 0))
    return mode, options


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _refuse(
    name: str, attribute: str, wanted: str, got: object, hint: str = ""
) -> NoReturn:
    text = f", got {got}"[:200] if got != "" else ""
    raise ValueError(f"`{attribute}` of the node {name!r} must be {wanted}{text}{hint}")


def _notes(
    graph: Graph,
    inputs: Mapping[str, str],
    direction: str,
    attributes: Mapping[str, Any],
) -> list[str]:
    notes = []
    if attributes.get("layout"):
        notes.append("layout=1: its states are [N, D, H], those of a call [D, N, H]")
    else:
        notes.append("layout=0: x is [T, N, I], so call with time_major=True")
    lengths = bool(inputs.get("sequence_lens"))
    if direction == "reverse" and lengths:  # the padding, flipped, comes first
        notes.append(
            f"direction=reverse with sequence_lens: {FLIPPED_BACK}; instead of "
            "seq_lengths, call with a mask, True at the steps below sequence_lens, and "
            "flip it as x"
        )
    elif direction == "reverse":
        notes.append(f"direction=reverse: {FLIPPED_BACK}")
    elif lengths:
        notes.append("sequence_lens: call with seq_lengths")
    states = [state for state in ("initial_h", "initial_c") if inputs.get(state)]
    if states:
        notes.append(f"{' and '.join(states)}: call with an initial state")
    source = _source_note(graph, inputs.get("X", ""))
    return [*notes, source] if source else notes


def _source_note(graph: Graph, name: str) -> str:
    """Return which recurrent nodes an input is made from, and by which operations."""
    ends, between = graph.sources(name, set(_KINDS))
    if not ends:
        return ""
    outputs = " and ".join(
        f"the output {dict(enumerate(_OUTPUTS)).get(n, n)} of the node {node!r}"
        for node, n in ends
    )
    kinds = [*dict.fromkeys(between)]
    more = f" and {len(kinds) - _MANY} more" if len(kinds) > _MANY else ""
    by = f"{', '.join(kinds[:_MANY])}{more}"
    if len(ends) == 1 and _LAYOUT.issuperset(kinds):
        return f"x is {outputs}" + (f", only laid out anew by {by}" if by else "")
    return f"x is computed from {outputs} by {by}; apply these between the calls"


def to_model(
    spec: RNNSpec,
    weights: Float[Array, " num_params"],
    *,
    opset: int | None = None,
    time_major: bool = False,
) -> Any:
    """Return a model of ONNX that computes what `ostinato.rnn` does.

    Its inputs are `x [N, T, I]`, `sequence_lens [N]` in 1..T as int32, `h_0` and, for
    an LSTM, `c_0`, `[L*D, N, H]`; its outputs are `y [N, T, D*H]`, 0 past each length,
    `h_n` and `c_n`. N and T are free.

    Args:
        spec: the network; what ONNX cannot express raises ValueError.
        weights: its flat vector.
        opset: version of ONNX's operators, from 13 on; None stands for 17, and for 22
            if the weights are bfloat16.
        time_major: whether `x` and `y` have time first, `[T, N, ...]`.

    Returns:
        An `onnx.ModelProto`, checked; dropout is left out.

    Raises:
        TypeError: `weights` is no array of floats, or traced; `time_major` is no bool.
        ValueError: `proj_size`, `cell_clip`, `input_mode="skip"` or several heads; an
            opset that the installed onnx does not know; bfloat16 before opset 22.
        ImportError: onnx is not installed.
    """
    with needs("onnx"):
        import onnx

    require(spec, "a model of ONNX", proj_size=0, cell_clip=None, input_mode="linear")
    layers = pseudo_layers(spec, weights)
    dtype = layers[0].w_hh.dtype
    time_major = _checks.check_bool("time_major", time_major)
    if opset is None:
        opset = _BFLOAT16_OPSET if dtype == jnp.bfloat16 else _OPSET
    opset = _checks.check_size("opset", opset, _OLDEST_OPSET)
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise ValueError(f"`opset` must be at most {newest}, got {opset}")
    if dtype == jnp.bfloat16 and opset < _BFLOAT16_OPSET:
        raise ValueError(
            f"`opset` must be at least {_BFLOAT16_OPSET} for bfloat16, got {opset}"
        )
    model = _Builder(onnx, np.dtype(dtype))
    y = _network(model, spec, layers, time_major)
    made = model.finish(spec, y, opset, time_major)
    onnx.checker.check_model(made, full_check=True)
    return made


def _network(
    model: _Builder, spec: RNNSpec, layers: list[LayerWeights], time_major: bool
) -> str:
    """Add the nodes of all layers; return the name of the output."""
    directions, hidden = spec.num_directions, spec.hidden_size
    states = ("h", "c") if spec.mode == "lstm" else ("h",)
    attributes: dict[str, Any] = {
        "hidden_size": hidden,
        "direction": "bidirectional" if directions == 2 else "forward",
        "activations": [
            name.capitalize() for name in _ACTIVATIONS[spec.mode] * directions
        ],
    }
    if spec.mode == "gru":
        attributes["linear_before_reset"] = int(spec.reset_after)
    x = "x" if time_major else model.node("Transpose", ["x"], perm=[1, 0, 2])
    last = {state: [] for state in states}
    for number in range(spec.num_layers):
        both = layers[number * directions : (number + 1) * directions]
        bounds = [number * directions, (number + 1) * directions]
        before = [
            f"{state}_0"
            if spec.num_layers == 1
            else model.node("Slice", [f"{state}_0", *map(model.index, bounds)])
            for state in states
        ]
        tensors = _tensors(spec, both)
        names = [
            model.constant(f"{key}_l{number}", value) if value is not None else ""
            for key, value in tensors.items()
        ]
        outputs = [f"y_l{number}", *[f"{state}_l{number}" for state in states]]
        model.node(
            _OPS[spec.mode],
            [x, *names, "sequence_lens", *before],
            outputs,
            name=f"rnn_l{number}",
            **attributes,
        )
        for state in states:
            last[state].append(f"{state}_l{number}")
        swapped = model.node("Transpose", [outputs[0]], perm=[0, 2, 1, 3])
        shape = model.index(0, 0, directions * hidden)
        x = model.node("Reshape", [swapped, shape])  # 0 keeps an axis as it is
    for state in states:
        model.node("Concat", last[state], [f"{state}_n"], axis=0)
    if time_major:
        return model.node("Identity", [x], ["y"])
    return model.node("Transpose", [x], ["y"], perm=[1, 0, 2])


def _tensors(spec: RNNSpec, both: list[LayerWeights]) -> dict[str, np.ndarray | None]:
    """Return `W`, `R` and `B` of the directions of one layer."""
    order = gate_order(spec.mode), GATES[spec.mode]

    def stacked(take: Callable[[LayerWeights], Array]) -> np.ndarray:
        return np.stack([np.asarray(take(layer)) for layer in both])

    def biases(layer: LayerWeights) -> Array:
        zeros = jnp.zeros(layer.w_hh.shape[0], layer.w_hh.dtype)
        pair = (layer.b_ih, layer.b_hh)
        return jnp.concatenate(
            [reorder_gates(zeros if b is None else b, *order) for b in pair]
        )

    return {
        "W": stacked(lambda layer: reorder_gates(layer.w_ih, *order)),
        "R": stacked(lambda layer: reorder_gates(layer.w_hh, *order)),
        "B": None if spec.bias == "none" else stacked(biases),
    }


class _Builder:
    """The nodes and constants of a graph under construction."""

    def __init__(self, onnx: Any, dtype: np.dtype) -> None:
        self.onnx = onnx
        self.type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def node(
        self,
        kind: str,
        inputs: list[str],
        outputs: list[str] | None = None,
        **attributes: Any,
    ) -> str:
        """Add a node; return the name of its first output."""
        outputs = outputs or [f"{kind.lower()}_{len(self.nodes)}"]
        attributes.setdefault("name", outputs[0])
        self.nodes.append(
            self.onnx.helper.make_node(kind, inputs, outputs, **attributes)
        )
        return outputs[0]

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add an array; return its name."""
        self.constants[name] = self.onnx.numpy_helper.from_array(value, name)
        return name

    def index(self, *values: int) -> str:
        """Add integers, once; return their name."""
        name = "index_" + "_".join(map(str, values))
        return self.constant(name, np.array(values, np.int64))

    def finish(self, spec: RNNSpec, y: str, opset: int, time_major: bool) -> Any:
        """Return the model."""
        helper, states = self.onnx.helper, ("h", "c") if spec.mode == "lstm" else ("h",)
        batch = ("T", "N") if time_major else ("N", "T")

        def value(name: str, shape: list[Any]) -> Any:
            return helper.make_tensor_value_info(name, self.type, shape)

        rows = spec.num_layers * spec.num_directions
        state_shape = [rows, "N", spec.hidden_size]
        lengths = helper.make_tensor_value_info(
            "sequence_lens", self.onnx.TensorProto.INT32, ["N"]
        )
        inputs = [value("x", [*batch, spec.input_size]), lengths]
        width = spec.num_directions * spec.hidden_size
        outputs = [value(y, [*batch, width])]
        inputs += [value(f"{state}_0", state_shape) for state in states]
        outputs += [value(f"{state}_n", state_shape) for state in states]
        graph = helper.make_graph(
            self.nodes, "ostinato", inputs, outputs, [*self.constants.values()]
        )
        opsets = [helper.make_opsetid("", opset)]
        return helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets),
            producer_name="ostinato",
        )
